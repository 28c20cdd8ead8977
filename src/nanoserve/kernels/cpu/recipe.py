"""How the native core is compiled: one shared object per instruction set, from the same sources.

The package's build, the C++ tests and the sanitizer runs all take their commands from here, so none
of them can drift from what ships. `-ffp-contract=off` is part of the definition of every sum
(docs/EXACTNESS.md): a multiply and an add are fused where the source says so and nowhere else.

As a script: `python recipe.py OUTPUT_FOLDER [ISA ...]`.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("ns.cpp", "model.cpp", "step.cpp", "pool.cpp")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-gnu-unique",  # objects of several instruction sets live in one process
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # a note about compilers of 2010
)
LINK_FLAGS = ("-shared", "-fPIC", "-static-libstdc++", "-static-libgcc")

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mprefer-vector-width=512",
    "-Wno-uninitialized",  # g++ 12 warns about its own _mm512_undefined
    "-Wno-maybe-uninitialized",
)
_X86_FLAGS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16_vnni": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}


def isa_flags(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Instruction sets that can be compiled for `machine` (None: this one), slowest first."""
    machine = machine or platform.machine()
    return _X86_FLAGS if machine in ("x86_64", "AMD64") else {"portable": ()}


def library_name(isa: str) -> str:
    """File name of the shared object for `isa`."""
    return f"libns_{isa}.so"


def compiler() -> list[str]:
    """$CXX, or the first C++ compiler there is. Raises FileNotFoundError if there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no C++ compiler (g++, c++ or clang++; CXX names another)")


def command(isa: str, output: Path) -> list[str]:
    """The one command that compiles and links the shared object of `isa`."""
    sources = [str(FOLDER / name) for name in SOURCES]
    flags = [*FLAGS, *isa_flags()[isa], *LINK_FLAGS]
    return [*compiler(), *flags, "-o", str(output), *sources]


def compile_library(isa: str, output: Path) -> None:
    """Compile `isa`; raises CalledProcessError, or OSError without a compiler."""
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(isa, output), check=True)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or isa_flags():
        compile_library(chosen, Path(sys.argv[1]) / library_name(chosen))
