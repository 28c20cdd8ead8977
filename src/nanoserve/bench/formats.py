"""Number formats as arms: the same model, its weights and its cache kept in one format or another.

Experiments that ask what a format buys or costs measure all of these beside one another, so they
take no format from the command line. A format that cannot run here (its executor is missing, or
another one was asked for) is a gap with a reason, never an arm that silently ran something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanoserve.bench.record import Record
from nanoserve.bench.session import Options, open_engine
from nanoserve.config import CacheDtype, Dtype, LoadFormat, ModelConfig, Quantization
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import StepShape, step_bytes, step_flops
from nanoserve.planner.steptime import Ceilings, num_eager_operations, roofline_s

REFERENCE = "float32"

STANDS_FOR: dict[str, tuple[str, ...]] = {
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "int8": ("bfloat16", "float32"),
    "int8-weight-only": ("float32",),
    "int4": ("float32",),
}
"""Whose matmul rate stands for a format's own where that was not measured: the first that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights and cache are kept; `kv` None: as `dtype`. `eager_only`: only eager runs it."""

    dtype: Dtype = "float32"
    quantization: Quantization | None = None
    kv: CacheDtype | None = None
    eager_only: bool = False

    @property
    def weights(self) -> str:
        """As the planner names what a weight takes."""
        return self.quantization or self.dtype

    @property
    def cache_dtype(self) -> CacheDtype:
        return self.kv or self.dtype

    def options(self, given: Options) -> Options:
        """What opens an engine of this format. Raises ValueError where that cannot be."""
        if self.eager_only and given.executor not in ("auto", "eager"):
            raise ValueError(f"{self.dtype} weights need the eager executor, not {given.executor}")
        return replace(
            given,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv,
            executor="eager" if self.eager_only else given.executor,
        )


FORMATS: dict[str, Format] = {
    REFERENCE: Format(),
    "KV bfloat16": Format(kv="bfloat16"),
    "KV float16": Format(kv="float16"),
    "KV int8": Format(kv="int8"),
    "float16": Format(dtype="float16", eager_only=True),
    "bfloat16": Format(dtype="bfloat16"),
    "bfloat16, KV int8": Format(dtype="bfloat16", kv="int8"),
    "int8-weight-only": Format(quantization="int8-weight-only"),
    "int8-weight-only, KV int8": Format(quantization="int8-weight-only", kv="int8"),
    "int8": Format(quantization="int8"),
    "int8, KV int8": Format(quantization="int8", kv="int8"),
    "int4": Format(quantization="int4"),
    "int4, KV int8": Format(quantization="int4", kv="int8"),
}
"""By name. Of one name without "KV", keys and values are kept in the weights' dtype (of quantised
weights: float32)."""


def refuse_formats(options: Options, experiment: str) -> None:
    """Raise ValueError if a number format was chosen for an experiment that takes none."""
    given = {
        "--dtype": options.dtype != "auto",
        "--quantization": options.quantization is not None,
        "--kv-cache-dtype": options.kv_cache_dtype is not None,
    }
    if named := [option for option, is_given in given.items() if is_given]:
        raise ValueError(f"{experiment} has number formats of its own: leave out {named[0]}")


def open_formats(
    options: Options, names: Sequence[str], load_format: LoadFormat, max_num_seqs: int
) -> tuple[dict[str, Engine], dict[str, str]]:
    """(an engine for each format, why there is none for the others), contiguous caches.

    Formats with the same weights share them. Raises ValueError if the first cannot run: then it is
    not the format that is wrong.
    """
    engines: dict[str, Engine] = {}
    gaps: dict[str, str] = {}
    donors: dict[str, Engine] = {}
    for name in names:
        weights = FORMATS[name].weights
        try:
            engine = open_engine(
                FORMATS[name].options(options),
                load_format,
                layout="contiguous",
                max_num_seqs=max_num_seqs,
                donor=donors.get(weights),
            )
            check_room(engine, max_num_seqs)
        except ValueError as error:
            if not engines:
                raise
            gaps[name] = reason(error)
        else:
            engines[name] = donors[weights] = engine
    return engines, gaps


def format_suffix(engine: Engine) -> str:
    """What a run's name says of formats that were asked for: a file of records for each."""
    config = engine.config
    weights = "" if config.quantization is None else f"-{config.quantization}"
    return weights if config.cache.dtype is None else f"{weights}-kv-{config.cache.dtype}"


def reason(error: Exception) -> str:
    """Its words in one line, as a record may hold them: of a path, the last part."""
    return re.sub(r"(?:/[\w.~+-]+)+/([\w.+-]+)", r"\1", " ".join(str(error).split()))


def check_room(engine: Engine, num_seqs: int) -> None:
    """Raise ValueError unless the cache holds `num_seqs` sequences."""
    if engine.spec.num_blocks < num_seqs:
        raise ValueError(
            f"the cache holds {engine.spec.num_blocks} sequences, {num_seqs} are to be measured: "
            "free some memory, or take a smaller --model"
        )


def expect_step(ceilings: Ceilings, model: ModelConfig, step: StepShape, engine: Engine) -> Record:
    """What the planner expects of a step on `engine`, its bytes and operations.

    `moving_s` is the floor that the bytes alone set, at the bandwidth of the ceilings.
    """
    spec = engine.spec
    weights = spec.quantization or spec.dtype
    rates = ceilings.matmul_flops_per_s
    is_eager = engine.executor.describe()["executor"] == "eager"
    num_bytes = step_bytes(model, step, dtype=weights, kv_dtype=spec.cache_dtype)
    flops = step_flops(model, step)
    operations = num_eager_operations(model, step.num_seqs) if is_eager else 0
    seconds = roofline_s(
        ceilings,
        num_bytes=num_bytes,
        flops=flops,
        dtype=next(name for name in (weights, *STANDS_FOR.get(weights, ())) if name in rates),
        num_operations=operations,
    )
    return {
        "step_s": seconds,
        "moving_s": num_bytes / ceilings.read_bytes_per_s,
        "dispatch_s": operations * ceilings.dispatch_s,
        "num_operations": operations,
        "num_bytes": num_bytes,
        "flops": flops,
    }
