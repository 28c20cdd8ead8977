"""The native CPU core: C++ sources, compiled once per instruction set, and the door to them.

`library` loads the shared object that suits the machine and describes its C interface (`ns.h`) to
ctypes; nothing else in Python knows of it. Like all kernels it knows nothing of nanoserve.
"""
