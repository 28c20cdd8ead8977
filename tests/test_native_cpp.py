"""The native core's C++ tests, compiled with the flags that ship: slow, because they compile."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUNNER = Path(__file__).parent / "native" / "run.py"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_runner", RUNNER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert shutil.which("g++"), "the C++ tests need g++ (CXX names another compiler)"
    return module


TESTS = ("core", "attention", "quantised", "step")


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_the_weakest_and_the_strongest_give_the_same_bits(
    runner: ModuleType, test: str, tmp_path: Path
) -> None:
    """Those between, as they ship, are compared in test_native.py; `make native` runs all here."""
    portable, *_, strongest = runner.machine_isas()
    assert portable == "portable" != strongest
    assert runner.run(test, [portable, strongest], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_sanitizers_find_nothing(runner: ModuleType, test: str, tmp_path: Path) -> None:
    assert runner.run(test, runner.machine_isas()[-1:], tmp_path, "address,undefined")


def test_every_cpp_test_is_run(runner: ModuleType) -> None:
    found = {path.stem.removeprefix("test_") for path in RUNNER.parent.glob("test_*.cpp")}
    assert found == set(runner.SOURCES)
