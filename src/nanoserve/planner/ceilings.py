"""The ceilings once measured on this machine, kept where any program of ours can find them.

`nanoserve bench` measures and saves them in the user's cache folder, under the part of the
machine's fingerprint that they depend on; `plan`, `--stats` and the engine's automatic token budget
read them in milliseconds. Nothing is measured here, and what was never measured is None.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from nanoserve.planner.hardware import (
    LIBRARIES,
    hardware,
    installed_version,
    machine_id,
    thread_variables,
)
from nanoserve.planner.steptime import Ceilings

logger = logging.getLogger(__name__)


def ceilings_path() -> Path:
    """`ceilings.json` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nanoserve" / "ceilings.json"


def ceilings_key(device: str, threads: int | None) -> str:
    """What measured ceilings depend on: the machine, the libraries, the device, the threads."""
    libraries = {name: installed_version(name) for name in LIBRARIES}
    parts = {"libraries": libraries, "device": device, "threads": threads, **hardware()}
    return machine_id({**parts, "thread_variables": thread_variables()})


def load_cached_ceilings(device: str = "cpu", threads: int | None = None) -> Ceilings | None:
    """The ceilings measured on this machine by `nanoserve bench ceilings`, or None.

    A cache file that cannot be read is as good as none; that is logged.
    """
    return read_ceilings_file().get(ceilings_key(device, threads))


def read_ceilings_file() -> dict[str, Ceilings]:
    path = ceilings_path()
    try:
        entries = json.loads(path.read_bytes())
        return {key: Ceilings.from_json(value) for key, value in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("cached ceilings are unreadable and ignored: %s", error)
        return {}


def save_ceilings(ceilings: Ceilings, device: str = "cpu", threads: int | None = None) -> None:
    """Keep `ceilings` for this machine; the file is replaced at once, so never half-written.

    They are a convenience: a cache folder that cannot be written is logged and nothing else.
    """
    entries = {**read_ceilings_file(), ceilings_key(device, threads): ceilings}
    text = json.dumps({key: value.to_json() for key, value in entries.items()}, indent=1)
    path = ceilings_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("the measured ceilings are not kept for later: %s", error)
