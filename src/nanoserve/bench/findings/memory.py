"""What a `memory` run says: the fitted terms, every ceiling against its bracket, what sets it.

The fit is here too, since it is a pure function of probes; the experiment stores what it predicts
before it looks. A prediction is right where the largest batch that fitted is no less than predicted
and the smallest that did not is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench.findings import Table, machine_name
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.record import Record, Run
from nanoserve.config import ModelConfig
from nanoserve.planner.memory import (
    PREFILL_ROWS,
    MemoryModel,
    activation_row_bytes,
    format_bytes,
    logits_row_bytes,
    mapped_bytes,
)
from nanoserve.planner.model import weight_bytes

OK, FULL = "ok", "out of memory"
PEAK_GOAL, WEIGHTS_GOAL, BRACKET_GOAL = 0.01, 0.02, 0.01

FITTED_COLUMNS = ("batch", "runtime_bytes", "peak_bytes", "scratch_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """A model of one arm's memory, and how well the probes that it was fitted to agree with it.

    `worst_residual` is relative to the peak. `kv_recovered` is what a fit that does not know the
    size of K and V makes of it, 1 being right; None where context and batch were varied too little.
    """

    model: MemoryModel
    num_probes: int
    worst_residual: float
    kv_recovered: float | None


def fit_memory(
    probes: Sequence[Record], *, kv_bytes_per_token: int, block_size: int, huge_page_bytes: int
) -> MemoryFit:
    """Least squares of both terms, K and V being known and taken off before.

    Each probe has `batch`, `context` and what `memory_probe.ProbeReport` holds. What a sequence
    adds is fitted to the executor's own count of its buffers, since a peak sees them in steps of a
    page; the fixed term then to the peaks. Raises ValueError unless there are two different
    batches: one alone cannot tell the terms apart.
    """
    values = {name: column(probes, name) for name in FITTED_COLUMNS}
    batches = values["batch"]
    if len(set(batches.tolist())) < 2:
        raise ValueError(f"a fit needs two different batches, got {batches.tolist()}")
    columns = np.stack([np.ones(len(probes)), batches], axis=1)
    (_, per_sequence), *_ = np.linalg.lstsq(columns, values["scratch_bytes"], rcond=None)
    model = MemoryModel(
        runtime_bytes=float(values["runtime_bytes"].mean()),
        fixed_bytes=0.0,
        per_sequence_bytes=float(per_sequence),
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
        huge_page_bytes=huge_page_bytes,
    )
    buffers = np.array([model.buffer_bytes(p["batch"]) for p in probes], dtype=np.float64)
    kv = np.array([model.kv_bytes(p["batch"], p["context"]) for p in probes], dtype=np.float64)
    held = values["peak_bytes"] - values["runtime_bytes"]
    fixed = held - buffers - kv
    return MemoryFit(
        model=replace(model, fixed_bytes=float(fixed.mean())),
        num_probes=len(probes),
        worst_residual=float(np.max(np.abs(fixed - fixed.mean()) / values["peak_bytes"])),
        kv_recovered=recover_kv(columns, kv, held),
    )


def column(probes: Sequence[Record], name: str) -> NDArray[np.float64]:
    return np.array([probe[name] for probe in probes], dtype=np.float64)


def recover_kv(
    columns: NDArray[np.float64], kv: NDArray[np.float64], held: NDArray[np.float64]
) -> float | None:
    """The third coefficient of a fit in which K and V are one more unknown."""
    scale = float(kv.max())
    three = np.column_stack([columns, kv / scale])
    if np.linalg.matrix_rank(three / np.linalg.norm(three, axis=0)) < 3:
        return None
    found, *_ = np.linalg.lstsq(three, held, rcond=None)
    return float(found[2]) / scale


def fit_values(fit: MemoryFit) -> Record:
    """The fit as recorded."""
    return asdict(fit)


def fit_from_record(record: Mapping[str, Any]) -> MemoryFit:
    """Inverse of `fit_values`."""
    return MemoryFit(**{**record, "model": MemoryModel(**record["model"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFit:
    """One arm's terms. `weights_bytes` are counted from the shape, not measured."""

    dtype: str
    cache_dtype: str
    weights_bytes: int
    fit: MemoryFit

    @property
    def recovered_bytes(self) -> float:
        """The fixed term, less what the weights' mapping is longer than the weights."""
        model, weights = self.fit.model, self.weights_bytes
        return model.fixed_bytes - (mapped_bytes(weights, model.huge_page_bytes) - weights)

    @property
    def weights_error(self) -> float:
        return self.recovered_bytes / self.weights_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One arm at one context: predicted and measured.

    `measured_peak_bytes` is of the largest batch that fitted, `predicted_peak_bytes` the model's
    for that batch. `if_all_logits`: sequences if a prefill kept the logits of every prompt row.
    """

    dtype: str
    cache_dtype: str
    context: int
    predicted: int
    largest_pass: int
    smallest_failure: int
    predicted_peak_bytes: float
    measured_peak_bytes: int
    kv_share: float
    if_all_logits: int

    @property
    def is_inside(self) -> bool:
        return self.largest_pass <= self.predicted < self.smallest_failure

    @property
    def is_narrow(self) -> bool:
        """One sequence, or one per cent."""
        width = self.smallest_failure - self.largest_pass
        return width <= max(1, BRACKET_GOAL * self.smallest_failure)

    @property
    def error(self) -> float:
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFindings:
    """Everything the memory experiment concludes. `probes` are all that were made, for the plot."""

    run: Run
    limit_bytes: int
    config: ModelConfig
    arms: tuple[ArmFit, ...]
    ceilings: tuple[Ceiling, ...]
    probes: tuple[Record, ...]

    @property
    def longest(self) -> list[Ceiling]:
        """The ceilings at the longest context, arm by arm."""
        context = max(ceiling.context for ceiling in self.ceilings)
        return [ceiling for ceiling in self.ceilings if ceiling.context == context]


def memory_findings(run: Run) -> MemoryFindings:
    """All conclusions of one complete run of the memory experiment."""
    config = ModelConfig(**run.header["setup"]["model_config"])
    predictions = [record for record in run.records if record["kind"] == "prediction"]
    probes = tuple(record for record in run.records if record["kind"] == "probe")
    limit_bytes = run.header["setup"]["limit_bytes"]
    arms = {(p["weights_dtype"], p["cache_dtype"]): p for p in reversed(predictions)}
    return MemoryFindings(
        run=run,
        limit_bytes=limit_bytes,
        config=config,
        arms=tuple(
            ArmFit(
                dtype=dtype,
                cache_dtype=cache_dtype,
                weights_bytes=weight_bytes(config, dtype),
                fit=fit_from_record(prediction["fit"]),
            )
            for (dtype, cache_dtype), prediction in reversed(arms.items())
        ),
        ceilings=tuple(conclude_ceiling(p, probes, config, limit_bytes) for p in predictions),
        probes=probes,
    )


def same_question(prediction: Record, probe: Record) -> bool:
    """Whether a probe under the limit is of the arm and the context of a prediction."""
    names = ("weights_dtype", "cache_dtype", "context")
    return probe["limit_bytes"] is not None and all(prediction[n] == probe[n] for n in names)


def conclude_ceiling(
    prediction: Record, probes: Sequence[Record], config: ModelConfig, limit_bytes: int
) -> Ceiling:
    """One prediction against the probes that came after it."""
    answers = [probe for probe in probes if same_question(prediction, probe)]
    largest = max((p for p in answers if p["outcome"] == OK), key=lambda probe: probe["batch"])
    model, context = fit_from_record(prediction["fit"]).model, prediction["context"]
    logits_bytes = logits_row_bytes(config) * context
    wasteful = replace(model, per_sequence_bytes=model.per_sequence_bytes + logits_bytes)
    batch = largest["batch"]
    return Ceiling(
        dtype=prediction["weights_dtype"],
        cache_dtype=prediction["cache_dtype"],
        context=context,
        predicted=prediction["num_sequences"],
        largest_pass=batch,
        smallest_failure=min(p["batch"] for p in answers if p["outcome"] == FULL),
        predicted_peak_bytes=model.peak_bytes(batch, context),
        measured_peak_bytes=largest["peak_bytes"],
        kv_share=model.kv_bytes(batch, context) / largest["peak_bytes"],
        if_all_logits=wasteful.num_sequences(limit_bytes, context),
    )


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def sequences_table(findings: MemoryFindings) -> Table:
    """Predicted ceilings and their brackets."""
    heads = ["weights", "KV", "context", "predicted", "fits", "fails", "peak MiB", "error"]
    return [*heads, "all logits"], [
        [
            ceiling.dtype,
            ceiling.cache_dtype,
            f"{ceiling.context:,}",
            f"{ceiling.predicted:,}" + ("" if ceiling.is_inside else " missed"),
            f"{ceiling.largest_pass:,}",
            f"{ceiling.smallest_failure:,}",
            mebibytes(ceiling.measured_peak_bytes),
            f"{ceiling.error:+.2%}",
            f"{ceiling.if_all_logits:,}",
        ]
        for ceiling in findings.ceilings
    ]


def terms_table(findings: MemoryFindings) -> Table:
    """The fitted terms in MiB; "found" is what of the weights' bytes the fixed one recovers."""
    heads = ["weights", "KV", "runtime", "fixed", "by shape", "found"]
    return [*heads, "KiB/seq", "B/token", "residual"], [
        [
            arm.dtype,
            arm.cache_dtype,
            mebibytes(arm.fit.model.runtime_bytes),
            mebibytes(arm.fit.model.fixed_bytes),
            mebibytes(arm.weights_bytes),
            f"{arm.weights_error:+.2%}",
            f"{arm.fit.model.per_sequence_bytes / 1024:,.0f}",
            f"{arm.fit.model.kv_bytes_per_token:,}",
            f"{arm.fit.worst_residual:.2%}",
        ]
        for arm in findings.arms
    ]


def memory_paragraph(findings: MemoryFindings) -> str:
    """How many sequences fit, what sets that, and how well it was known beforehand."""
    return " ".join(
        [
            f"On this machine, {machine_name(findings.run)}, {subject(findings.run)} under a limit "
            f"of {mebibytes(findings.limit_bytes)} MiB: {fitting_words(findings)}.",
            share_sentence(findings),
            inside_sentence(findings),
            goal_sentence(
                "The peak of the largest batch that fits was predicted to within",
                max(abs(ceiling.error) for ceiling in findings.ceilings),
                PEAK_GOAL,
            ),
            goal_sentence(
                "The fixed term recovers the weights' bytes to within",
                max(abs(arm.weights_error) for arm in findings.arms),
                WEIGHTS_GOAL,
            ),
        ]
    )


def fitting_words(findings: MemoryFindings) -> str:
    longest = findings.longest
    counts = ", ".join(
        f"{ceiling.largest_pass:,} with {ceiling.cache_dtype} K and V"
        + ("" if ceiling.dtype == longest[0].dtype else f" and {ceiling.dtype} weights")
        for ceiling in longest
    )
    return f"at context {longest[0].context:,} the sequences that fit are {counts}"


def share_sentence(findings: MemoryFindings) -> str:
    """What of the peak is K and V, and what else a sequence adds."""
    shares = [ceiling.kv_share for ceiling in findings.longest]
    context = findings.longest[0].context
    said = f"K and V are {percent_range(shares)} of the peak there"
    ratios = [
        model.per_sequence_bytes / (model.kv_bytes_per_token * context)
        for model in (arm.fit.model for arm in findings.arms)
    ]
    return f"{said}; all else that a sequence adds is {percent_range(ratios)} of its K and V."


def percent_range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1%}", f"{max(values):.1%}"
    return low if low == high else f"{low} to {high}"


def inside_sentence(findings: MemoryFindings) -> str:
    ceilings = findings.ceilings
    inside = sum(ceiling.is_inside for ceiling in ceilings)
    narrow = all(ceiling.is_narrow for ceiling in ceilings)
    width = "no wider than one sequence or 1 %" if narrow else "some wider than 1 %"
    who = f"All {len(ceilings)}" if inside == len(ceilings) else f"{inside} of {len(ceilings)}"
    said = f"{who} ceilings predicted before they were probed lie in their measured brackets"
    if inside == len(ceilings):
        return f"{said} ({width})."
    furthest = max(abs(ceiling.predicted - ceiling.largest_pass) for ceiling in ceilings)
    return f"{said} ({width}), the others miss by {furthest:,} or less."


def goal_sentence(what: str, error: float, goal: float) -> str:
    verdict = "meets" if error <= goal else "misses"
    return f"{what} {error:.2%}, which {verdict} the goal of {goal:.0%}."


def memory_notes(findings: MemoryFindings) -> str:
    """What is counted, and what a user's engine has beside it."""
    config = findings.config
    context = findings.longest[0].context
    logits = logits_row_bytes(config) * context
    prefill = PREFILL_ROWS * activation_row_bytes(config, "float32")
    return (
        f"{counted_words(findings)} Every page of K and V was written. Runtime is what stood "
        "before a model was there; found is the fixed term, less what the mapping of the "
        "weights is longer than they are, against their bytes by their shape. Residual is the "
        "worst of the fit. "
        "The last column of the ceilings is computed: sequences if a prefill kept the logits of "
        f"every prompt row, {format_bytes(logits)} a sequence at {context:,}; the engine makes one "
        f"row. A step that carries {PREFILL_ROWS} rows of a prompt holds "
        f"{format_bytes(prefill)} of activations beside what was probed."
    )


def counted_words(findings: MemoryFindings) -> str:
    if findings.run.header["device"] != "cpu":
        return "The limit is on what PyTorch's allocator takes from the device."
    return (
        "The limit is the kernel's on private writable memory (RLIMIT_DATA), set in a fresh "
        "process for each probe once the weights were packed; it counts whole mappings, so buffers "
        "and cache of the native core are counted in its pages."
    )


def memory_numbers(findings: MemoryFindings) -> dict[str, str]:
    """What prose may quote."""
    return {
        "limit": f"{mebibytes(findings.limit_bytes)} MiB",
        "largest-error": f"{max(abs(ceiling.error) for ceiling in findings.ceilings):.2%}",
        "inside": f"{sum(ceiling.is_inside for ceiling in findings.ceilings)}",
        "ceilings": f"{len(findings.ceilings)}",
    }
