"""What an install brings: one version, pins that agree with the bounds, everything in the wheel."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanoserve
from nanoserve.kernels.cpu import library

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGE = ROOT / "src" / "nanoserve"


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in parsed}


def pins() -> dict[str, Requirement]:
    """requirements.txt, without comments and options."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return requirements([line for line in lines if line.strip() and line[0] not in "#-"])


def test_the_version_has_one_home() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "nanoserve.__version__"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^version: (.+)$", citation) == [nanoserve.__version__]


def test_requirements_pin_what_the_project_names_and_nothing_else() -> None:
    # Rivals are for `bench peers` alone: no test runs one.
    extras = [e for name, e in PROJECT["optional-dependencies"].items() if name != "peers"]
    bounds = requirements([*PROJECT["dependencies"], *itertools.chain(*extras)])
    assert pins().keys() == bounds.keys()
    for name, pin in pins().items():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{pin} is not exact"
        assert specifier.version in bounds[name].specifier, f"{pin} is outside {bounds[name]}"


def test_the_changelog_knows_the_version_or_holds_it_back() -> None:
    headings = re.findall(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1] == nanoserve.__version__


def data_files() -> set[str]:
    """What must travel beside the code, as paths inside a wheel: every file that is not Python."""
    return {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc", ".so"}
    }


READER = """\
import pathlib, subprocess, sys
output = sys.argv[sys.argv.index("-o") + 1]
arguments = [word for word in sys.argv[1:] if word not in ("-o", output)]
subprocess.run([*{compiler!r}, "-E", *arguments], stdout=subprocess.DEVNULL, check=True)
pathlib.Path(output).touch()
"""
"""A compiler that reads all that the real one reads, and writes an empty object."""


def build_archives(work: Path) -> tuple[set[str], set[str]]:
    """File names in the wheel and in the sdist, both built from a copy of what git would hold.

    The wheel is built from the sdist, so a source or a header that is missing there is missed here.
    """
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", work / "src", ignore=ignored)
    reader = work / "reader.py"
    reader.write_text(READER.format(compiler=recipe()["compiler"]()), encoding="utf-8")
    environment = os.environ | {"CXX": shlex.join([sys.executable, str(reader)])}
    # Without isolation the build uses the setuptools that is here, and needs no network.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), "."]
    subprocess.run(build, cwd=work, check=True, capture_output=True, timeout=550, env=environment)
    (wheel,), (sdist,) = (work / "dist").glob("*.whl"), (work / "dist").glob("*.tar.gz")
    assert "-py3-none-" in wheel.name, "the native core belongs to a platform, to no Python"
    with zipfile.ZipFile(wheel) as wheel_file, tarfile.open(sdist) as sdist_file:
        inside = {name.partition("/")[2] for name in sdist_file.getnames()}
        return set(wheel_file.namelist()), inside


@pytest.mark.slow
def test_the_archives_hold_everything(tmp_path: Path) -> None:
    """One test, because one build makes both."""
    wheel, sdist = build_archives(tmp_path)
    check_wheel(wheel)
    check_native_core(wheel)
    check_sdist(sdist)


def check_wheel(wheel: set[str]) -> None:
    modules = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*.py")}
    assert "nanoserve/py.typed" in data_files()
    missing = (modules | data_files()) - wheel
    assert not missing
    info = f"nanoserve-{nanoserve.__version__}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= wheel
    assert not [name for name in wheel if name.startswith(("tests/", "scripts/"))]


def check_native_core(wheel: set[str]) -> None:
    built = {name for name in wheel if name.endswith(".so")}
    assert built == {f"nanoserve/kernels/cpu/libns_{isa}.so" for isa in recipe()["isa_flags"]()}


def check_sdist(sdist: set[str]) -> None:
    missing = {f"src/{name}" for name in data_files()} - sdist
    assert not missing
    assert {"LICENSE", "README.md", "pyproject.toml"} <= sdist


def recipe() -> dict[str, Any]:
    return runpy.run_path(str(PACKAGE / "kernels" / "cpu" / "recipe.py"))


def test_the_recipe_and_the_loader_agree() -> None:
    """On which instruction sets there are, what their objects are called, what they speak."""
    made = recipe()
    assert list(made["isa_flags"]("x86_64")) == list(library.CPU_FLAGS)
    for isa in library.CPU_FLAGS:
        assert made["library_name"](isa) == library.path_of(isa).name
    header = (PACKAGE / "kernels" / "cpu" / "ns.h").read_text(encoding="utf-8")
    assert f"#define NS_ABI_VERSION {library.ABI_VERSION}\n" in header
    assert f"#define NS_MAX_TOP_LOGPROBS {library.MAX_TOP_LOGPROBS}\n" in header


@pytest.mark.slow
def test_without_a_compiler_the_install_succeeds(tmp_path: Path) -> None:
    """The objects are optional: what is left is the Python of it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "dist", "."]
    environment = os.environ | {"CXX": str(tmp_path / "no-such-compiler")}
    done = subprocess.run(
        build,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert "the native core for avx2 was not compiled" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
