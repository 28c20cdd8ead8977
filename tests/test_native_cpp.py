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


@pytest.mark.slow
@pytest.mark.parametrize("test", ["core", "attention", "quantised", "step"])
def test_every_instruction_set_gives_the_same_bits(
    runner: ModuleType, test: str, tmp_path: Path
) -> None:
    isas = runner.machine_isas()
    assert "portable" in isas
    assert runner.run(test, isas, tmp_path)


SANITIZED = [(test, "address,undefined") for test in ("core", "attention", "quantised", "step")]
SANITIZED += [(test, "thread") for test in ("core", "step")]


@pytest.mark.slow
@pytest.mark.parametrize("test,sanitize", SANITIZED)
def test_sanitizers_find_nothing(
    runner: ModuleType, test: str, sanitize: str, tmp_path: Path
) -> None:
    assert runner.run(test, runner.machine_isas()[-1:], tmp_path, sanitize)


def test_every_cpp_test_is_run(runner: ModuleType) -> None:
    found = {path.stem.removeprefix("test_") for path in RUNNER.parent.glob("test_*.cpp")}
    assert found == set(runner.SOURCES)
