"""What an `overhead` run says: microseconds of planning by running requests, the model's share.

And what a token through `LLM.generate` takes beyond the bare step, in pairs of one round; and what
the native sampler takes for a row of logits, of which each repetition times several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanoserve.bench.findings import Table, counted, machine_name, noise_sentence
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, describe, supported_percentile
from nanoserve.bench.record import Run
from nanoserve.bench.stepcosts import non_negative_least_squares

PLANNING, ENGINE = "planning", "engine"
ALL_ROWS = "rows"
"""Of a repetition of the sampler; its other parts are single rows."""

GOAL_FIXED_S, GOAL_EACH_S = 150e-6, 4e-6
"""Planning a step is to cost at most this, and this for each running request."""

GOAL_BUSY = 0.85
"""The model is to work at least this share of the wall time."""

GOAL_END_TO_END = {"float32": 0.08, "bfloat16": 0.08, "int8": 0.15}
"""A token through `LLM.generate` may take so much longer than the bare step, by its weights."""

GOAL_ROW_S, GOAL_ROW_VOCAB = 100e-6, 50_257
"""The native sampler is to take at most this for a row of so many logits, however it samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds = `fixed_s` + `each_s` x running requests."""

    fixed_s: float
    each_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadPoint:
    """Seconds per step with so many running requests and no model."""

    running: int
    planning: Distribution
    engine: Distribution

    @property
    def goal_s(self) -> float:
        return GOAL_FIXED_S + GOAL_EACH_S * self.running

    @property
    def meets_goal(self) -> bool:
        return self.planning.median <= self.goal_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """Seconds a token of one request, bare and through `LLM.generate`; `extra` is paired."""

    weights: str
    sampling: str
    bare: Distribution
    generate: Distribution
    extra: Distribution  # generate / bare - 1

    @property
    def goal(self) -> float | None:
        return GOAL_END_TO_END.get(self.weights)

    @property
    def misses_goal(self) -> bool:
        return self.goal is not None and self.extra.median > self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """Seconds of one row of logits in the native sampler; `p95_s` None: too few rows to say."""

    isa: str
    mode: str
    vocab_size: int
    row: Distribution
    p95_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadFindings:
    """Everything the overhead experiment concludes. `busy` is the model's share, by repetition."""

    run: Run
    context: int
    points: tuple[OverheadPoint, ...]
    planning: Line
    engine: Line
    busy_running: int
    busy: Distribution
    end_to_end: tuple[EndToEnd, ...]
    sampled_rows: tuple[SampledRow, ...]


def overhead_findings(run: Run) -> OverheadFindings:
    """All conclusions of one complete run of the overhead experiment."""
    samples = [sample for sample in run.final_samples if not sample.dropped]
    labels = {sample.group: sample.labels for sample in samples}
    seconds = counted(samples, "steps")
    busy_group = next(name for name, values in labels.items() if values.get("with_model"))
    points = [
        OverheadPoint(
            running=values["running"],
            planning=describe([s / values["num_steps"] for s in seconds[name, PLANNING]]),
            engine=describe([s / values["num_steps"] for s in seconds[name, ENGINE]]),
        )
        for name, values in labels.items()
        if name != busy_group and "running" in values
    ]
    points.sort(key=lambda point: point.running)
    running = [point.running for point in points]
    return OverheadFindings(
        run=run,
        context=labels[busy_group]["context"],
        points=tuple(points),
        planning=fit_line(running, [point.planning.median for point in points]),
        engine=fit_line(running, [point.engine.median for point in points]),
        busy_running=labels[busy_group]["running"],
        busy=describe(
            [s.seconds["model"] / s.seconds["steps"] for s in samples if s.group == busy_group]
        ),
        end_to_end=tuple(
            end_to_end([s for s in samples if s.group == name], sampling)
            for name, values in labels.items()
            for sampling in values.get("samplings", ())
        ),
        sampled_rows=tuple(sampled_rows(run, samples)),
    )


def sampled_rows(run: Run, samples: Sequence[Sample]) -> Iterator[SampledRow]:
    """Each instruction set and mode in the order of the run's arms; none in a run without them."""
    labels = {sample.group: sample.labels for sample in samples if "isa" in sample.labels}
    cells: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        single = [seconds for part, seconds in sample.seconds.items() if part != ALL_ROWS]
        cells.setdefault((sample.group, sample.arm), []).extend(single)
    for group, arms in run.header["setup"]["arms"].items():
        for arm in arms if group in labels else ():
            yield SampledRow(
                isa=labels[group]["isa"],
                mode=arm,
                vocab_size=labels[group]["vocab_size"],
                row=describe(cells[group, arm]),
                p95_s=supported_percentile(cells[group, arm], 0.95),
            )


def end_to_end(samples: Sequence[Sample], sampling: str) -> EndToEnd:
    """Of one group's samples, those that sample so."""
    labels = samples[0].labels
    bare, generate = f"bare step, {sampling}", f"LLM.generate, {sampling}"

    def each(arm: str) -> Distribution:
        seconds = [s.seconds["tokens"] for s in samples if s.arm == arm]
        return describe([value / labels["num_tokens"] for value in seconds])

    ratios = paired_ratios(samples, generate, bare, "tokens")
    return EndToEnd(
        weights=labels["weights"],
        sampling=sampling,
        bare=each(bare),
        generate=each(generate),
        extra=describe([ratio - 1 for ratio in ratios]),
    )


def fit_line(running: Sequence[int], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors, neither coefficient below 0."""
    measured = np.array(seconds)
    columns = np.stack([np.ones(len(running)), np.array(running, dtype=np.float64)], axis=1)
    fixed_s, each_s = non_negative_least_squares(
        columns / measured[:, None], np.ones(len(running))
    ).tolist()
    return Line(fixed_s=fixed_s, each_s=each_s)


def overhead_table(findings: OverheadFindings) -> Table:
    """Microseconds per step by running requests."""
    heads = ["running", "planning µs", "goal", "", "whole engine µs"]
    return heads, [
        [
            f"{point.running:,}",
            marked_us(point.planning),
            f"{point.goal_s * 1e6:,.0f}",
            "met" if point.meets_goal else "missed",
            marked_us(point.engine),
        ]
        for point in findings.points
    ]


def end_to_end_table(findings: OverheadFindings) -> Table:
    """Milliseconds a token of one request, by weights and sampling."""
    heads = ["weights", "sampling", "bare step ms", "LLM.generate ms", "more", "goal", ""]
    return heads, [
        [
            row.weights,
            row.sampling,
            f"{row.bare.median * 1e3:.2f}",
            f"{row.generate.median * 1e3:.2f}",
            f"{row.extra.median:.1%}",
            "" if row.goal is None else f"{row.goal:.0%}",
            "" if row.goal is None else "missed" if row.misses_goal else "met",
        ]
        for row in findings.end_to_end
    ]


def end_to_end_sentence(findings: OverheadFindings) -> str:
    """How much longer a token takes through `LLM.generate`; nothing where that was not measured."""
    rows = findings.end_to_end
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row.extra.median)
    missed = [f"{row.weights}, {row.sampling}" for row in rows if row.misses_goal]
    goals = f"misses its goal in {'; '.join(missed)}" if missed else "keeps within every goal"
    return (
        f" Through LLM.generate, one request at a time, a token takes at most "
        f"{worst.extra.median:.1%} longer than the bare step "
        f"({(worst.generate.median - worst.bare.median) * 1e6:,.0f} µs, {worst.weights}, "
        f"{worst.sampling}), which {goals}."
    )


def sampler_table(findings: OverheadFindings) -> Table:
    """Microseconds a row, median / 95th percentile, by way of sampling and instruction set."""
    cells = {(row.mode, row.isa): sampled_text(row) for row in findings.sampled_rows}
    isas = list(dict.fromkeys(row.isa for row in findings.sampled_rows))
    modes = dict.fromkeys(row.mode for row in findings.sampled_rows)
    return ["sampling", *isas], [[mode, *(cells[mode, isa] for isa in isas)] for mode in modes]


def sampled_text(row: SampledRow) -> str:
    p95 = "?" if row.p95_s is None else f"{row.p95_s * 1e6:,.0f}"
    return " ".join(filter(None, (f"{row.row.median * 1e6:,.0f} / {p95}", row.row.mark)))


def sampler_sentence(rows: Sequence[SampledRow]) -> str:
    """The slowest mode of each instruction set, and the promise; nothing where none was measured.

    For another vocabulary than the promise names there is no verdict.
    """
    if not rows:
        return ""
    slowest = [
        max((row for row in rows if row.isa == isa), key=lambda row: row.row.median)
        for isa in dict.fromkeys(row.isa for row in rows)
    ]
    said = ", ".join(f"{row.row.median * 1e6:,.0f} µs on {row.isa} ({row.mode})" for row in slowest)
    start = (
        f" On one thread, a row of {rows[0].vocab_size:,} logits takes the native sampler, in the "
        f"slowest of {len(rows) // len(slowest)} ways to sample and in the median, {said}"
    )
    if rows[0].vocab_size != GOAL_ROW_VOCAB:
        return f"{start}; the promise is about rows of {GOAL_ROW_VOCAB:,}."
    return f"{start}. {promise_text(slowest)}"


def promise_text(slowest: Sequence[SampledRow]) -> str:
    """Whether the slowest mode of each instruction set keeps the promise, and by how much."""
    promise = f"The promise of at most {GOAL_ROW_S * 1e6:.0f} µs is"
    spare_us = {row.isa: (GOAL_ROW_S - row.row.median) * 1e6 for row in slowest}
    missed = [f"by {-us:,.1f} µs on {isa}" for isa, us in spare_us.items() if us < 0]
    if missed:
        return f"{promise} not kept: it is missed {', '.join(missed)}."
    return f"{promise} kept, with {min(spare_us.values()):,.1f} µs to spare."


def marked_us(distribution: Distribution) -> str:
    text = f"{distribution.median * 1e6:,.0f}"
    return f"{text} {distribution.mark}" if distribution.mark else text


def line_text(line: Line) -> str:
    return f"{line.fixed_s * 1e6:,.0f} µs + {line.each_s * 1e6:.1f} µs a request"


def overhead_paragraph(findings: OverheadFindings) -> str:
    """What the engine's own work costs here, and how much of the time the model has."""
    reached = "reaches" if findings.busy.median >= GOAL_BUSY else "misses"
    return (
        f"On this machine, {machine_name(findings.run)}, planning a step of decodes at context "
        f"{findings.context:,} (schedule, batch, commit) costs {line_text(findings.planning)}; all "
        f"that the engine does beside the model, text and log included, "
        f"{line_text(findings.engine)}. With {findings.busy_running} running requests of "
        f"{subject(findings.run)} the model works {findings.busy.median:.1%} of the wall time, "
        f"which {reached} the goal of {GOAL_BUSY:.0%}.{end_to_end_sentence(findings)}"
        f"{sampler_sentence(findings.sampled_rows)} "
        f"{noise_sentence(findings.run)}"
    )
