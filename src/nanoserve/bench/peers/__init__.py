"""Other engines under the same questions: one file a peer, each in a process of its own.

`face.py` is what a peer must do, `worker.py` the process it does that in, `process.py` the end of
the pipe that experiments hold. A peer's library is imported in its own worker and nowhere else, so
that no two engines share a process, its thread pools or its memory.
"""
