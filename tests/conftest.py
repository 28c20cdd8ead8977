"""What every test stands on: no network, no cache but its own, fixed threads, fixed examples.

The environment is set while this file is imported, before any test module can import a library
that reads it once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback
import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# Two threads wherever the suite runs: the order of a sum, and so the last bits of a logit, depends
# on their number.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("TRITON_INTERPRET", "1")  # read as kernels are defined; 0: they are compiled
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_XET"] = "1"  # its sockets are not Python's, so the guard cannot see them
for name in [n for n in os.environ if n.startswith("NANOSERVE_")]:
    del os.environ[name]  # the options of whoever runs the suite

loopback.install()
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(TESTS / "offline"), os.environ.get("PYTHONPATH")))
)

settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def no_network_attempts() -> Iterator[None]:
    """Fail the test that tried to leave the machine, even if its code swallowed the refusal."""
    loopback.attempts.clear()
    yield
    assert not loopback.attempts, f"the test tried to leave the machine: {loopback.attempts}"


@pytest.fixture(autouse=True)
def hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh, empty Hugging Face home and user cache; the path of the former.

    huggingface_hub reads the environment once, on import, so a copy that is loaded already is
    pointed there too. Child processes inherit the environment.
    """
    home = tmp_path / "hf-home"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if constants := sys.modules.get("huggingface_hub.constants"):
        monkeypatch.setattr(constants, "HF_HOME", str(home))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    return home


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Put torch's thread count, which is one per process, back where a test found it."""
    torch: Any = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if before is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)
