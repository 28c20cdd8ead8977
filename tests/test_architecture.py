"""The floors of the house, torch in its rooms, and the style that a machine can hold.

Read from the source (`house.py`), then proved in processes where torch and the extras cannot be
imported. Every rule is also tried on an example that breaks it: a check that cannot fail is none.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import house
import pytest

from nanoserve.kernels.cpu import library

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "nanoserve"
MODULES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
TEST_FILES, SCRIPTS = (
    {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    for folder in ("tests", "scripts")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


IMPORTED_AS = {"llama-cpp-python": "llama_cpp", "pillow": "PIL"}
"""Packages whose module is not called like them."""


def import_names(requirements: Iterable[str]) -> set[str]:
    """`{"huggingface_hub"}` for `["huggingface-hub>=1.31,<3"]`."""
    names = (re.split("[<>=!~;[ ]", r, maxsplit=1)[0] for r in requirements)
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


CORE = import_names(PROJECT["dependencies"])
EXTRAS = import_names(itertools.chain(*PROJECT["optional-dependencies"].values()))
CLIENTS = import_names(
    line
    for path in ROOT.glob("requirements-clients.txt")  # of the tests marked `clients`
    for line in path.read_text(encoding="utf-8").splitlines()
    if line and line[0] not in "#-"
)


def libraries(files: dict[str, str]) -> set[str]:
    return set().union(*(house.third_party_libraries(path, text) for path, text in files.items()))


def test_the_house_is_in_order() -> None:
    assert {"config.py", "request.py", "kv/cache.py", "engine/batch.py"} <= MODULES.keys()
    complaints = [c for path, source in MODULES.items() for c in house.check_module(path, source)]
    assert not complaints, "\n".join(complaints)


def test_every_test_asserts() -> None:
    assert len(TEST_FILES) > 3
    complaints = [c for path, source in TEST_FILES.items() for c in house.check_tests(path, source)]
    assert not complaints, "\n".join(complaints)


def test_every_library_is_declared() -> None:
    used = libraries(MODULES)
    undeclared, unused = used - CORE - EXTRAS, CORE - used
    assert not undeclared, f"imported, but neither the core nor an extra brings it: {undeclared}"
    assert not unused, f"in the core install, but nobody imports it: {unused}"


def test_every_library_of_tests_and_scripts_is_declared() -> None:
    beside = TEST_FILES | SCRIPTS
    undeclared = libraries(beside) - CORE - EXTRAS - CLIENTS - {Path(path).stem for path in beside}
    assert not undeclared, f"imported, but no extra brings it: {undeclared}"


DOC = '"""A room."""\n'

BROKEN = {
    # floors
    "up": ("kv/cache.py", "from nanoserve.engine.batch import StepBatch", "kv may only import"),
    "sideways on the first floor": (
        "planner/memory.py",
        "import nanoserve.scheduling.plan",
        "below",
    ),
    "sideways on the ground": ("request.py", "from nanoserve.config import Dtype", "below"),
    "through the package": ("model/hub.py", "from nanoserve import cli", "cli is not"),
    "the face from below": ("engine/engine.py", "from nanoserve import LLM", "__init__ is not"),
    "relative": ("kv/cache.py", "from ..engine import batch", "engine is not"),
    "relative, two rooms": ("kv/deep/cache.py", "from ... import llm", "llm is not"),
    "typing only": (
        "kv/cache.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nanoserve.engine.batch",
        "engine is not",
    ),
    "kernels know nobody": (
        "kernels/a.py",
        "from nanoserve.config import Dtype",
        "nothing of ours",
    ),
    "an unknown room": ("cellar/wine.py", "x = 1", "in no storey"),
    "an unknown file": ("utils.py", "x = 1", "in no storey"),
    "an unknown target": ("cli.py", "import nanoserve.utils", "in no storey"),
    # lazy imports of own code
    "lazy": ("llm.py", "def f():\n    from nanoserve.engine import engine", "goes to the top"),
    "lazy in a helper of the cli": (
        "cli.py",
        "def f():\n    from nanoserve.llm import LLM",
        "goes to the top",
    ),
    "lazy in the table, another room": (
        "engine/build.py",
        "def make_executor():\n    from nanoserve.model import hub",
        "goes to the top",
    ),
    "lazy beside the table": (
        "engine/build.py",
        "def f():\n    from nanoserve.engine import eager",
        "goes to the top",
    ),
    "lazy by import_module": (
        "llm.py",
        "import importlib\ndef f():\n    importlib.import_module('nanoserve.engine.eager')",
        "goes to the top",
    ),
    "computed": ("llm.py", "import importlib\nimportlib.import_module(name)", "cannot be checked"),
    # libraries
    "torch outside": ("engine/engine.py", "import torch", "torch is imported only in"),
    "torch outside, lazily": ("llm.py", "def f():\n    import torch.nn", "torch is imported only"),
    "torch outside, tried": (
        "bench/measure.py",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "torch is imported only",
    ),
    "torch outside, typing only": (
        "engine/engine.py",
        "import typing\nif typing.TYPE_CHECKING:\n    from torch import Tensor",
        "torch is imported only",
    ),
    "torch outside, by name": ("llm.py", "__import__('torch')", "torch is imported only"),
    "numpy on the ground": ("config.py", "import numpy as np", "standard library only"),
    "numpy in the scheduler": ("scheduling/blocks.py", "import numpy", "standard library only"),
    "matplotlib at the top": ("bench/plots.py", "import matplotlib", "where it is used"),
    "another room's extra": ("model/hub.py", "import fastapi", "where it is used"),
    "a server's jinja2 at the top": ("server/app.py", "import jinja2", "where it is used"),
    "the hub at the top": ("model/hub.py", "from huggingface_hub import x", "where it is used"),
    "a terminal below": ("engine/engine.py", "from rich import print", "talks to the terminal"),
    "a second clock": ("bench/record.py", "from time import perf_counter", "reads a clock"),
    # style
    "no docstring": ("kv/cache.py", None, "no module docstring"),
    "a long function": ("llm.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    "a long file": ("llm.py", "x = 1\n" * 600, "601 lines in one file"),
    "a silent except": ("llm.py", "try:\n    x = 1\nexcept Exception:\n    pass", "hides"),
    "a silent bare except": ("llm.py", "try:\n    x = 1\nexcept:\n    ...", "hides"),
    "a silent tuple": (
        "llm.py",
        "for y in z:\n    try:\n        x = 1\n    except (OSError, Exception):\n        continue",
        "hides",
    ),
    "suppress": ("llm.py", "import contextlib\nwith contextlib.suppress(Exception): f()", "hides"),
    "hasattr": ("llm.py", "x = hasattr(y, 'z')", "hasattr"),
    "is_prefill": ("llm.py", "def f(*, is_prefill: bool): ...", "advance by q"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_found(case: str) -> None:
    path, code, expected = BROKEN[case]
    complaints = house.check_module(path, "x = 1\n" if code is None else DOC + code)
    assert len(complaints) == 1, complaints
    assert complaints[0].startswith(f"{path}:")
    assert expected in complaints[0]


SOUND = {
    "down": ("model/gpt2.py", "import torch\nfrom nanoserve.kv.cache import KVCache"),
    "same room": ("kernels/a.py", "from nanoserve.kernels import b\nfrom . import c"),
    "the cli above bench": ("cli.py", "import typer\nfrom nanoserve import __version__, bench"),
    "a command": (
        "cli.py",
        "@app.command()\ndef serve():\n    from nanoserve.server import app\n    import uvicorn",
    ),
    "a bare command": ("cli.py", "@app.command\ndef plan():\n    import nanoserve.planner"),
    "the executor table": (
        "engine/build.py",
        "def make_executor():\n    from nanoserve.engine.eager import EagerExecutor",
    ),
    "bin files": (
        "model/weights.py",
        "def read_bin():\n    from nanoserve.model.pickled import read_pickled",
    ),
    "an extra where it is used": ("bench/plots.py", "def f():\n    import matplotlib.pyplot"),
    "an extra's types": (
        "bench/plots.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib import axes",
    ),
    "an extra's own room": ("server/app.py", "from fastapi import FastAPI"),
    "the clock": ("bench/measure.py", "from time import perf_counter_ns"),
    "the standard library": ("config.py", "from __future__ import annotations\nimport math"),
    "an empty package": ("kv/__init__.py", None),
    "a broad except that speaks": (
        "llm.py",
        "try:\n    x = 1\nexcept Exception as error:\n    log.warning('%s', error)",
    ),
    "a narrow except": ("llm.py", "try:\n    x = 1\nexcept KeyError:\n    pass"),
    "sixty lines": ("llm.py", "def f():\n" + "    x = 1\n" * 59),
}


@pytest.mark.parametrize("case", SOUND)
def test_a_kept_rule_is_left_alone(case: str) -> None:
    path, code = SOUND[case]
    assert house.check_module(path, "" if code is None else DOC + code) == []


BROKEN_TESTS = {
    "nothing": "def test_x():\n    f()",
    "a constant": "def test_x():\n    assert True",
    "a helper that does not": "def run():\n    f()\ndef test_x():\n    run()",
    "in a class": "class TestX:\n    def test_y(self):\n        f()",
    "async": "async def test_x():\n    await f()",
    "a skip": "def test_x():\n    if not f():\n        pytest.skip('no')\n    assert g()",
    "a skip in a helper": "def g():\n    pytest.importorskip('x')\ndef test_x():\n    assert g()",
}


@pytest.mark.parametrize("case", BROKEN_TESTS)
def test_a_test_that_cannot_fail_is_found(case: str) -> None:
    assert len(house.check_tests("tests/test_x.py", BROKEN_TESTS[case])) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def test_x():\n    assert f() == 1",
        "def test_x():\n    with pytest.raises(ValueError, match='x'):\n        f()",
        "def test_x():\n    np.testing.assert_allclose(f(), 1)",
        "def same(a, b):\n    assert a == b\ndef test_x():\n    same(f(), 1)",
        "@pytest.mark.skipif(NO_GPU, reason='needs a GPU')\ndef test_x():\n    assert f()",
    ],
)
def test_a_test_that_can_fail_is_left_alone(source: str) -> None:
    assert house.check_tests("tests/test_x.py", source) == []


ABSENT = sorted(
    EXTRAS
    | {"torch", "triton", "matplotlib", "plotly", "transformers", "jinja2", "fastapi", "uvicorn"}
    | {"huggingface_hub"}  # in the core, but slow to import: only finding a hub model needs it
)

PRELUDE = """
import runpy, sys

sys.modules.update(dict.fromkeys(ABSENT))  # None: neither imported nor found
"""


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python in which torch and every extra cannot be imported."""
    return run_without(ABSENT, code)


def run_without(libraries: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python in which these libraries cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", f"ABSENT = {libraries!r}\n{PRELUDE}{code}"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=SRC,
        check=False,
    )


def run_command_without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m nanoserve ARGUMENTS`, the same way."""
    return run_without_extras(
        f"sys.argv = {['nanoserve', *arguments]!r}\n"
        "runpy.run_module('nanoserve', run_name='__main__', alter_sys=True)"
    )


@pytest.mark.parametrize("library", ["torch", "matplotlib", "transformers", "huggingface_hub"])
def test_what_is_absent_really_is(library: str) -> None:
    child = run_without_extras(f"import {library}")
    assert child.returncode == 1
    assert f"import of {library} halted" in child.stderr


def test_import_needs_no_extra() -> None:
    child = run_without_extras("import nanoserve; print(nanoserve.SamplingParams().max_tokens)")
    assert (child.returncode, child.stdout) == (0, "16\n"), child.stderr


NEEDS_AN_EXTRA = ("server/", "cli/serve.py")


def importing(paths: Iterable[str]) -> str:
    """Code that imports these modules of ours."""
    modules = (p.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in paths)
    return "".join(f"import nanoserve.{module}\n" for module in modules)


def test_outside_torchs_places_every_module_loads_without_it() -> None:
    others = (*house.TORCH_PLACES, *NEEDS_AN_EXTRA, "__init__.py", "__main__.py")
    child = run_without_extras(importing(p for p in MODULES if not p.startswith(others)))
    assert child.returncode == 0, child.stderr


def test_the_server_loads_without_torch_and_without_a_model() -> None:
    server = [path for path in MODULES if path.startswith(NEEDS_AN_EXTRA)]
    assert len(server) > 10
    child = run_without(["torch"], importing(server))
    assert child.returncode == 0, child.stderr


LIGHT_COMMANDS = [("--help",), ("--version",), ("plan",)]
NATIVE_COMMANDS = [
    ("generate", "Once upon a time", "--max-tokens", "4", "--stats"),
    ("generate", "Once", "--max-tokens", "4", "--quantization", "int8", "--top-p", "0.9"),
    ("verify", "--kv-cache-dtype", "int8"),
]


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS, ids=" ".join)
def test_commands_that_need_no_extra(arguments: tuple[str, ...]) -> None:
    child = run_command_without_extras(*arguments)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()


@pytest.mark.skipif(not library.available(), reason="needs the native core, not built here")
@pytest.mark.parametrize("arguments", NATIVE_COMMANDS, ids=" ".join)
def test_commands_that_the_native_core_runs_without_torch(arguments: tuple[str, ...]) -> None:
    child = run_command_without_extras(*arguments)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()


@pytest.mark.skipif(not library.available(), reason="needs the native core, not built here")
def test_generating_imports_nothing_heavy() -> None:
    code = (
        "from nanoserve import LLM, SamplingParams\n"
        "import nanoserve.cli.generate\n"
        "LLM('mini', device='cpu').generate('Once', SamplingParams(max_tokens=2))\n"
        "loaded = {'pydantic', 'matplotlib', 'torch', 'huggingface_hub'} & sys.modules.keys()\n"
        "print(sorted(name for name in loaded if sys.modules[name]))\n"
    )
    child = run_without_extras(code)
    assert (child.returncode, child.stdout) == (0, "[]\n"), child.stderr


def test_without_torch_what_needs_it_says_so_in_one_line() -> None:
    child = run_command_without_extras("generate", "Once", "--executor", "eager")
    assert child.returncode == 2
    assert child.stderr.strip() == (
        "nanoserve: --executor eager: eager: PyTorch is not installed "
        "(pip install 'nanoserve[torch]')"
    )
