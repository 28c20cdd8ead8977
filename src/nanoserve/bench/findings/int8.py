"""What an `int8` run says: what attention costs over each kind of cache, and what of it is left.

Ratios are taken inside rounds. "Directly" is the native core's attention on the integers; "read
back" is PyTorch's over float32 that was made from the integers just before, held against PyTorch's
over a cache in float32, so that what differs between the two is the reading back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
    counted,
    interval_text,
    machine_name,
    marked,
    milliseconds,
    noise_sentence,
    off,
    times,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, describe
from nanoserve.bench.record import Run

FLOAT32, INT8 = "float32", "int8"
READ_BACK, TORCH = "int8, read back", "float32, PyTorch"

MOST_INT8 = 0.5
"""Attention over int8 should take at most this part of float32's, at the largest shape."""

MOST_GROWTH = 1.35
"""A step at the long context over one at the short, one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCell:
    """One shape: attention by cache, and ratios of it and of whole steps over float32's."""

    batch: int
    context: int
    attention: Mapping[str, Distribution]
    step: Mapping[str, Distribution]
    against_float32: Mapping[str, Distribution]
    step_against_float32: Mapping[str, Distribution]
    reading_back: Distribution | None
    predicted_s: Mapping[str, float]
    errors: Mapping[str, Mapping[str, float]]

    @property
    def int8_ratio(self) -> Distribution:
        """Attention over int8 directly, over that of float32."""
        return self.against_float32[INT8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flatness:
    """A whole step of one sequence at a long context over a short one, by round."""

    name: str
    short: Distribution
    long: Distribution
    growth: Distribution
    predicted_growth: float

    @property
    def is_reached(self) -> bool:
        return self.growth.median <= MOST_GROWTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Findings:
    """Everything the int8 experiment concludes; cells by batch, then context."""

    run: Run
    cells: tuple[AttentionCell, ...]
    flatness: tuple[Flatness, ...]
    flat_contexts: tuple[int, int]
    gaps: Mapping[str, str]

    @property
    def largest(self) -> AttentionCell:
        return self.cells[-1]


def int8_findings(run: Run) -> Int8Findings:
    """All conclusions of one complete run of the int8 experiment."""
    cells = [attention_cell(run, group) for group in run.header["predictions"]]
    flat = next(s for s in run.final_samples if "contexts" in s.labels)
    short, long = flat.labels["contexts"]
    return Int8Findings(
        run=run,
        cells=tuple(sorted(cells, key=lambda cell: (cell.batch, cell.context))),
        flatness=tuple(flatness(run, name, short, long) for name in flat.labels["formats"]),
        flat_contexts=(short, long),
        gaps=run.header["gaps"],
    )


def attention_cell(run: Run, group: str) -> AttentionCell:
    """One shape of a run."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    labels = samples[0].labels
    predicted = run.header["predictions"][group]
    return AttentionCell(
        batch=labels["batch"],
        context=labels["context"],
        attention=distributions(samples, "attention", predicted),
        step=distributions(samples, "step", predicted),
        against_float32=ratios(samples, "attention", predicted),
        step_against_float32=ratios(samples, "step", predicted),
        reading_back=ratios_of(samples, READ_BACK, TORCH, "attention"),
        predicted_s={name: values["attention_s"] for name, values in predicted.items()},
        errors=labels["errors"],
    )


def distributions(
    samples: list[Sample], part: str, names: Mapping[str, object]
) -> dict[str, Distribution]:
    """Seconds of `part` by arm, of those arms that have it."""
    found = {arm: seconds for (_, arm), seconds in counted(samples, part).items()}
    return {name: describe(found[name]) for name in names if name in found}


def ratios(
    samples: list[Sample], part: str, names: Mapping[str, object]
) -> dict[str, Distribution]:
    """`part` of each arm over float32's."""
    found = {name: ratios_of(samples, name, FLOAT32, part) for name in names}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def ratios_of(
    samples: list[Sample], numerator: str, denominator: str, part: str
) -> Distribution | None:
    found = paired_ratios(samples, numerator, denominator, part)
    return describe(found) if found else None


def flatness(run: Run, name: str, short: int, long: int) -> Flatness:
    """One format of the last group."""
    samples = [sample for sample in run.final_samples if "contexts" in sample.labels]
    found = {arm: seconds for (_, arm), seconds in counted(samples, "step").items()}
    near, far = f"{name} at {short}", f"{name} at {long}"
    predicted = run.header["flat_predictions"]
    return Flatness(
        name=name,
        short=describe(found[near]),
        long=describe(found[far]),
        growth=describe(paired_ratios(samples, far, near, "step")),
        predicted_growth=predicted[far]["step_s"] / predicted[near]["step_s"],
    )


def attention_table(findings: Int8Findings) -> Table:
    """Every shape and cache: attention of all layers, and the whole step."""
    heads = [
        "batch",
        "context",
        "cache",
        "attention ms",
        "predicted",
        "of float32's",
        "95 %",
        "step ms",
        "of float32's",
    ]
    return heads, [
        [
            str(cell.batch),
            f"{cell.context:,}",
            name,
            marked(attention),
            f"{milliseconds(cell.predicted_s[name])} "
            f"({off(cell.predicted_s[name], attention.median)})",
            times(cell.against_float32[name].median),
            interval_text(cell.against_float32[name]),
            marked(cell.step[name]) if name in cell.step else "-",
            times(cell.step_against_float32[name].median)
            if name in cell.step_against_float32
            else "-",
        ]
        for cell in findings.cells
        for name, attention in cell.attention.items()
    ]


def flatness_table(findings: Int8Findings) -> Table:
    """Whole steps of one sequence at both contexts."""
    short, long = findings.flat_contexts
    heads = ["format", f"ms at {short:,}", f"ms at {long:,}", "growth", "95 %", "by its bytes"]
    return heads, [
        [
            flat.name,
            marked(flat.short),
            marked(flat.long),
            times(flat.growth.median),
            interval_text(flat.growth),
            times(flat.predicted_growth),
        ]
        for flat in findings.flatness
    ]


def int8_paragraph(findings: Int8Findings) -> str:
    """What the numbers mean on this machine."""
    return " ".join(
        [
            f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
            direct_sentence(findings),
            read_back_sentence(findings),
            small_sentence(findings),
            flat_sentence(findings),
            noise_sentence(findings.run),
        ]
    )


def direct_sentence(findings: Int8Findings) -> str:
    """The largest shape, against the goal."""
    cell = findings.largest
    ratio, step = cell.int8_ratio.median, cell.step_against_float32[INT8].median
    goal = "at most half" if ratio <= MOST_INT8 else "not the half of it or less that was the goal"
    return (
        f"at batch {cell.batch} and context {cell.context:,}, attention directly on int8 takes "
        f"{milliseconds(cell.attention[INT8].median)} ms, on float32 "
        f"{milliseconds(cell.attention[FLOAT32].median)} ms: {times(ratio)}, {goal}; "
        f"the whole step takes {times(step)} as long."
    )


def read_back_sentence(findings: Int8Findings) -> str:
    """What reading back costs where it is done, against what attending directly costs."""
    cell = findings.largest
    if cell.reading_back is None:
        return f"What reading back costs was not measured: {next(iter(findings.gaps.values()))}."
    back, direct = cell.reading_back.median, cell.int8_ratio.median
    change = f"{times(back)} as long as over float32"
    if back > 1 > direct:
        verdict = "there int8 saves memory and costs time; directly it saves both"
    elif direct < 1:
        verdict = "both ways save time"
    else:
        verdict = "directly it saves no time here"
    return (
        "The usual way, reading the cache back to float32 and attending to that, takes PyTorch "
        f"{change}: {verdict}."
    )


def small_sentence(findings: Int8Findings) -> str:
    """The range over all shapes, so that the best one does not stand for all."""
    found = sorted(findings.cells, key=lambda cell: cell.int8_ratio.median)
    best, worst = found[0], found[-1]
    return (
        f"Over all {len(found)} shapes attention on int8 takes between "
        f"{times(best.int8_ratio.median)} (batch {best.batch}, context {best.context:,}) and "
        f"{times(worst.int8_ratio.median)} (batch {worst.batch}, context {worst.context:,}) "
        "of float32's time."
    )


def flat_sentence(findings: Int8Findings) -> str:
    """Growth with the context, against the goal."""
    short, long = findings.flat_contexts
    said = ", ".join(f"{flat.name} {times(flat.growth.median)}" for flat in findings.flatness)
    missed = [flat.name for flat in findings.flatness if not flat.is_reached]
    verdict = (
        f"more than {MOST_GROWTH:g} in {'; '.join(missed)}"
        if missed
        else (f"at most {MOST_GROWTH:g} in all")
    )
    return (
        f"A step of one sequence at context {long:,} takes, against {short:,}: {said}; {verdict}."
    )


def int8_numbers(findings: Int8Findings) -> dict[str, str]:
    """What prose may quote."""
    cell = findings.largest
    return {
        "batch": str(cell.batch),
        "context": f"{cell.context:,}",
        "attention_ratio": times(cell.int8_ratio.median),
        "step_ratio": times(cell.step_against_float32[INT8].median),
        "attention_speedup": times(1 / cell.int8_ratio.median),
        "paragraph": int8_paragraph(findings),
    }
