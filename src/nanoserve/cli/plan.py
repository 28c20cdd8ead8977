"""`nanoserve plan`: the ceilings it may be given, read from what a person or `bench` wrote.

A file holds either the three numbers as one JSON object, as anybody can type them for a machine
that is not at hand, or the records of `nanoserve bench ceilings`.
"""

from __future__ import annotations

import json
from pathlib import Path

from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.record import read_runs
from nanoserve.planner.steptime import Ceilings

CEILINGS_FORM = (
    'an object such as {"read_bytes_per_s": 3e12, "matmul_flops_per_s": {"float16": 8e14}, '
    '"dispatch_s": 5e-6}, or records of `nanoserve bench ceilings`'
)


def read_ceilings(path: Path) -> Ceilings:
    """What `--ceilings` names. Raises ValueError for what cannot be read, or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"--ceilings: {path} cannot be read: {reason}") from error
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return recorded_ceilings(path)
    try:
        return Ceilings.from_json(given)
    except ValueError as error:
        raise ValueError(f"--ceilings: {path}: {error}; it needs {CEILINGS_FORM}") from error


def recorded_ceilings(path: Path) -> Ceilings:
    """Of the last complete run in a file of records."""
    runs, _ = read_runs(path)
    complete = [r for r in runs if r.is_complete and r.header["experiment"] == "ceilings"]
    if not complete:
        raise ValueError(f"--ceilings: {path} has no complete run of ceilings: {CEILINGS_FORM}")
    return ceilings_of(complete[-1].final_samples)
