"""Compile and run the C++ tests of the native core, on every instruction set this machine has.

The flags are those that ship (kernels/cpu/recipe.py), -O2 apart. Where a test prints a digest, all
instruction sets must print the same one: that is the claim of docs/EXACTNESS.md, checked on whole
steps, which are linked with the objects that ship where those are built.

    python tests/native/run.py                                   # everything
    python tests/native/run.py --sanitize address,undefined      # one instruction set, instrumented
    python tests/native/run.py --sanitize thread core step
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
CPU = FOLDER.parents[1] / "src" / "nanoserve" / "kernels" / "cpu"

SOURCES: dict[str, tuple[str, ...]] = {
    "core": ("pool.cpp",),
    "attention": (),
    "quantised": (),
    "step": ("ns.cpp", "model.cpp", "step.cpp", "pool.cpp"),
}
"""Each test, and what it is linked with beside its own file."""


def load(name: str) -> ModuleType:
    """A module of kernels/cpu by its path: this runs before anything is installed."""
    spec = importlib.util.spec_from_file_location(name, CPU / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def machine_isas() -> list[str]:
    """Instruction sets that are compiled and that this machine runs, weakest first."""
    library = load("library")
    runnable = [isa for isa, needed in library.CPU_FLAGS.items() if needed <= library.cpu_flags()]
    return [isa for isa in load("recipe").isa_flags() if isa in runnable]


def build(test: str, isa: str, folder: Path, sanitize: str = "") -> Path:
    """Compile one test; its path. Raises CalledProcessError if it does not compile."""
    recipe = load("recipe")
    flags = [*recipe.FLAGS, *recipe.isa_flags()[isa], f"-I{CPU}"]
    flags[flags.index("-O3")] = "-O2"  # a quarter of the time to compile, and no other bits
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-g1", "-O1"]  # -g1: lines
    binary = folder / f"test_{test}_{isa}"
    core = [CPU / name for name in SOURCES[test]]
    if not sanitize and SOURCES[test] == recipe.SOURCES and (library := shipped(isa)):
        core = [library]
    command = [*recipe.compiler(), *flags, "-o", binary, FOLDER / f"test_{test}.cpp", *core]
    subprocess.run(command, check=True)
    return binary


def shipped(isa: str) -> Path | None:
    """The package's own shared object, if it was built since its sources last changed."""
    library: Path = CPU / load("recipe").library_name(isa)
    sources = [*CPU.glob("*.cpp"), *CPU.glob("*.h"), CPU / "recipe.py"]
    newest = max(path.stat().st_mtime for path in sources)
    return library if library.exists() and library.stat().st_mtime > newest else None


def run(test: str, isas: list[str], folder: Path, sanitize: str = "") -> bool:
    """Build and run one test on each instruction set; False if one failed or they differ."""
    digests: dict[str, str] = {}
    passed = True
    for isa in isas:
        done = subprocess.run(
            [build(test, isa, folder, sanitize)], stdout=subprocess.PIPE, text=True, check=False
        )
        lines = done.stdout.splitlines() or ["(no output)"]
        report(f"{test} [{isa}]: {'ok' if done.returncode == 0 else done.stdout} {lines[-1]}")
        passed &= done.returncode == 0
        if "digest" in lines[-1]:
            digests[isa] = lines[-1]
    if len(set(digests.values())) > 1:
        report(f"{test}: the instruction sets differ: {digests}")
        passed = False
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=list(SOURCES), help="which tests")
    parser.add_argument("--isa", action="append", help="which instruction sets, again for more")
    parser.add_argument("--sanitize", default="", help="for the compiler's -fsanitize=")
    arguments = parser.parse_args()
    isas = arguments.isa or machine_isas()
    if arguments.sanitize and not arguments.isa:
        isas = isas[-1:]
    with tempfile.TemporaryDirectory() as folder:
        results = [run(name, isas, Path(folder), arguments.sanitize) for name in arguments.tests]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
