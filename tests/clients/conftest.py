"""What the tests with other people's clients share: the servers, and the marker.

Every test in this folder has the marker `clients`. The libraries are not needed for the other
tests, and need not be there when these are collected, so tests import them where they use them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import KEY, RunningServer, serving

import nanoserve
from nanoserve import LLM

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)
            # The libraries' own are not ours to mend, and little code of ours runs in here.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module", autouse=True)
def leftovers() -> Iterator[None]:
    """Collect here what libraries leave open: in the modules that follow it would be an error."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Over `mini`, with room for all that these tests ask for."""
    with serving("--model", "mini") as running:
        yield running


@pytest.fixture(scope="session")
def guarded() -> Iterator[RunningServer]:
    """One request at a time, none queued, three seconds each, for those who know `KEY`."""
    limits = ("--max-num-seqs", "1", "--max-queue", "0", "--request-timeout", "3")
    with serving("--model", "mini", "--api-key", KEY, *limits) as running:
        yield running


@pytest.fixture(scope="session")
def mini() -> Path:
    """The folder of the embedded model; clients take the tokenizer from it."""
    return Path(nanoserve.__file__).parent / "models" / "mini"


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model with no server between."""
    return LLM("mini", device="cpu")
