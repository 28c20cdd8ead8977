"""The native core as optional extensions: one shared object per instruction set, no Python inside.

Everything else about the package is in pyproject.toml. An object that cannot be compiled (no
compiler, or one that does not know an instruction set) is left out with a warning, and the install
succeeds: nanoserve then uses the others, or PyTorch. Because nothing here is tied to a version of
Python, one wheel per platform serves all of them.
"""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/nanoserve/kernels/cpu")
PACKAGE = "nanoserve.kernels.cpu"
RECIPE: dict[str, Any] = runpy.run_path(str(SOURCES / "recipe.py"))


class BuildNative(build_ext):
    """Runs the recipe's one command for each instruction set, as many at once as there are CPUs."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count() or 1

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version: ctypes loads it by its plain name."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        isa = output.stem.removeprefix("libns_")
        try:
            RECIPE["compile_library"](isa, output)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the native core for {isa} was not compiled: {error}") from error


class PlatformWheel(bdist_wheel):
    """Any Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


def extensions() -> list[Extension]:
    """One per instruction set that this processor family has."""
    return [
        Extension(
            f"{PACKAGE}.{Path(RECIPE['library_name'](isa)).stem}",
            sources=[str(SOURCES / name) for name in RECIPE["SOURCES"]],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            optional=True,
        )
        for isa in RECIPE["isa_flags"]()
    ]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
