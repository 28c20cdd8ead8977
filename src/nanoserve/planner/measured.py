"""What was once measured on this machine, kept where any program of ours can find it.

`nanoserve bench` measures and saves in the user's cache folder, under the part of the machine's
fingerprint that a value depends on: its ceilings (for `plan`, `--stats` and predictions) and the
token budgets that keep the promised gap (for the engine's automatic budget). They are read in
milliseconds. Nothing is measured here, and what was never measured is None.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.planner.hardware import (
    LIBRARIES,
    hardware,
    installed_version,
    machine_id,
    thread_variables,
)
from nanoserve.planner.steptime import Ceilings

logger = logging.getLogger(__name__)

LARGEST_KEPT_BUDGET = 2**20
"""Token rows of a step; no machine was ever measured to stand more, so a larger one is damage."""


def kept_path(name: str) -> Path:
    """`<name>.json` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache).

    Raises RuntimeError for a user without a home, as in many a container.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nanoserve" / f"{name}.json"


def kept_key(device: str, threads: int | None, more: Mapping[str, Any] | None = None) -> str:
    """What measured values depend on: the machine, the libraries, the device, the threads."""
    libraries = {name: installed_version(name) for name in LIBRARIES}
    parts = {"libraries": libraries, "device": device, "threads": threads, **hardware()}
    return machine_id({**parts, "thread_variables": thread_variables(), **(more or {})})


def read_kept(name: str) -> dict[str, Any]:
    """Everything kept under `name`, by key; unreadable is as good as nothing, and is logged."""
    try:
        entries = json.loads(kept_path(name).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as error:  # no home, or nested without an end
        logger.warning("cached %s are unreadable and ignored: %s", name, error)
        return {}
    if not isinstance(entries, dict):
        logger.warning("cached %s are unreadable and ignored: not a JSON object", name)
        return {}
    return entries


def keep(name: str, key: str, value: object) -> None:
    """Keep `value` (of JSON) for this machine; the file is replaced at once, never half-written.

    It is a convenience: a cache folder that cannot be written is logged and nothing else.
    """
    text = json.dumps({**read_kept(name), key: value}, indent=1)
    try:
        path = kept_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except (OSError, RuntimeError) as error:
        logger.warning("the measured %s are not kept for later: %s", name, error)


def ceilings_path() -> Path:
    return kept_path("ceilings")


def load_cached_ceilings(device: str = "cpu", threads: int | None = None) -> Ceilings | None:
    """The ceilings measured on this machine by `nanoserve bench ceilings`, or None."""
    found = read_kept("ceilings").get(kept_key(device, threads))
    try:
        return None if found is None else Ceilings.from_json(found)
    except ValueError as error:
        logger.warning("cached ceilings are unreadable and ignored: %s", error)
        return None


def save_ceilings(ceilings: Ceilings, device: str = "cpu", threads: int | None = None) -> None:
    """Keep `ceilings` for this machine, see `keep`."""
    keep("ceilings", kept_key(device, threads), ceilings.to_json())


def budget_key(
    model: ModelConfig,
    *,
    executor: str,
    dtype: str,
    kv_dtype: str,
    layout: str,
    device: str,
    threads: int | None,
) -> str:
    """What a measured token budget depends on, beside the machine: who computes what, how."""
    ways = {"executor": executor, "dtype": dtype, "kv_dtype": kv_dtype, "layout": layout}
    return kept_key(device, threads, {**ways, "model": asdict(model)})


def load_budget(key: str) -> int | None:
    """The token budget that `nanoserve bench interference` found for `budget_key`, or None."""
    found = read_kept("budgets").get(key)
    if found is None:
        return None
    is_number = isinstance(found, int) and not isinstance(found, bool)
    if not is_number or not 1 <= found <= LARGEST_KEPT_BUDGET:
        logger.warning("a cached token budget is unreadable and ignored: %.80r", found)
        return None
    return int(found)


def save_budget(key: str, budget: int) -> None:
    """Keep a measured token budget for this machine, see `keep`."""
    keep("budgets", key, budget)
