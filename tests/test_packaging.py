"""What an install brings: one version, pins that agree with the bounds, everything in the wheel."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanoserve

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
    extras = itertools.chain(*PROJECT["optional-dependencies"].values())
    bounds = requirements([*PROJECT["dependencies"], *extras])
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
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """File names in the wheel and in the sdist, both built from a copy of what git would hold."""
    work = tmp_path_factory.mktemp("packaging")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", work / "src", ignore=ignored)
    # Without isolation the build uses the setuptools that is here, and needs no network.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), "."]
    subprocess.run(build, cwd=work, check=True, capture_output=True, timeout=300)
    (wheel,), (sdist,) = (work / "dist").glob("*.whl"), (work / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as wheel_file, tarfile.open(sdist) as sdist_file:
        inside = {name.partition("/")[2] for name in sdist_file.getnames()}
        return set(wheel_file.namelist()), inside


@pytest.mark.slow
def test_the_wheel_holds_everything(archives: tuple[set[str], set[str]]) -> None:
    wheel, _ = archives
    modules = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*.py")}
    assert "nanoserve/py.typed" in data_files()
    missing = (modules | data_files()) - wheel
    assert not missing
    info = f"nanoserve-{nanoserve.__version__}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= wheel
    assert not [name for name in wheel if name.startswith(("tests/", "scripts/"))]


@pytest.mark.slow
def test_the_sdist_holds_everything(archives: tuple[set[str], set[str]]) -> None:
    _, sdist = archives
    missing = {f"src/{name}" for name in data_files()} - sdist
    assert not missing
    assert {"LICENSE", "README.md", "pyproject.toml"} <= sdist
