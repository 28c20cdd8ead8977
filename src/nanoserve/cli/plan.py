"""`nanoserve plan`: from what was typed to a plan.

Ceilings may be given in a file: either the three numbers as one JSON object, as anybody can type
them for a machine that is not at hand, or the records of `nanoserve bench ceilings`.
"""

from __future__ import annotations

import json
from pathlib import Path

from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.machine import load_cached_ceilings
from nanoserve.bench.record import read_runs
from nanoserve.config import DtypeOption, EngineConfig
from nanoserve.engine.build import available_memory_bytes, resolve_device, resolve_dtype
from nanoserve.model.hub import find
from nanoserve.model.weights import load_model_config
from nanoserve.planner.memory import parse_bytes
from nanoserve.planner.plan import Plan, make_plan
from nanoserve.planner.steptime import Ceilings

CEILINGS_FORM = (
    'an object such as {"read_bytes_per_s": 3e12, "matmul_flops_per_s": {"float16": 8e14}, '
    '"dispatch_s": 5e-6}, or records of `nanoserve bench ceilings`'
)


def plan_asked_for(
    model: str,
    *,
    gpu_memory: str | None,
    context: int | None,
    dtype: DtypeOption,
    kv_cache_dtype: str,
    quantization: str,
    ceilings: Path | None,
) -> Plan:
    """The plan of what was typed; no weight is read. Raises ValueError naming the option."""
    memory_bytes = available_memory_bytes() if gpu_memory is None else parse_bytes(gpu_memory)
    device = resolve_device("auto" if gpu_memory is None else "cuda")
    return make_plan(
        model,
        load_model_config(find(model, load_format="dummy")),
        memory_bytes=memory_bytes,
        context=context,
        dtype=resolve_dtype(EngineConfig(dtype=dtype), device),
        kv_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
        quantization=None if quantization == "none" else quantization,
        ceilings=load_cached_ceilings(device) if ceilings is None else read_ceilings(ceilings),
    )


def read_ceilings(path: Path) -> Ceilings:
    """What `--ceilings` names. Raises ValueError for what cannot be read, or holds none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
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
