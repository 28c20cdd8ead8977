"""What a `neighbour` run says: the mean step beside a busy loop, and the slowest in a hundred.

Every step was timed by itself, so means and percentiles are over all steps of all rounds: total
over total, never a mean of ratios. The interval is that of the ratios taken inside rounds. A 99th
percentile is told only where there are steps enough to say something of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
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
from nanoserve.bench.metrics import Distribution, describe, min_samples, supported_percentile
from nanoserve.bench.record import Run

IDLE, BESIDE = "idle", "beside a busy loop"

STEPS = "steps"
"""The part of a repetition that is the sum of all its steps."""

GOAL_MEAN, GOAL_TAIL = 1.7, 4.0
"""Beside one busy loop: the mean step over the idle mean, and the 99th percentile over the idle
median, are to be at most this."""

TAIL = 0.99


def step_name(number: int) -> str:
    """The part of a repetition that is its step `number`, from 0."""
    return f"step {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourPoint:
    """One format. `by_round` is the sum of a round's steps beside the loop over the idle sum.

    99th percentiles are in seconds; None with too few steps to tell.
    """

    name: str
    idle: Distribution  # of single steps
    idle_mean_s: float
    beside_mean_s: float
    by_round: Distribution
    idle_p99_s: float | None
    beside_p99_s: float | None
    predicted: float

    @property
    def slowdown(self) -> float:
        """Mean step beside the loop over the idle mean."""
        return self.beside_mean_s / self.idle_mean_s

    @property
    def tail(self) -> float | None:
        """99th percentile beside the loop over the idle median."""
        return None if self.beside_p99_s is None else self.beside_p99_s / self.idle.median

    @property
    def idle_tail(self) -> float | None:
        """The same of idle steps: what of the tail is not the neighbour's doing."""
        return None if self.idle_p99_s is None else self.idle_p99_s / self.idle.median

    @property
    def misses_mean(self) -> bool:
        return self.slowdown > GOAL_MEAN

    @property
    def is_undecided(self) -> bool:
        """Rounds do not tell on which side of its goal the mean is: their interval holds it."""
        interval = self.by_round.interval
        return interval is None or GOAL_MEAN in interval

    @property
    def misses_tail(self) -> bool:
        return self.tail is not None and self.tail > GOAL_TAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourFindings:
    """Everything the neighbour experiment concludes, in the order of formats."""

    run: Run
    points: tuple[NeighbourPoint, ...]
    context: int
    num_steps: int  # of each arm, all rounds together; the fewest of any format
    num_threads: int
    num_cores: int
    gaps: Mapping[str, str]

    @property
    def predicted(self) -> float:
        return self.points[0].predicted

    @property
    def tails(self) -> dict[str, float]:
        """By format, where there were steps enough."""
        return {point.name: point.tail for point in self.points if point.tail is not None}


def step_seconds(samples: Sequence[Sample], arm: str) -> list[float]:
    """Every step of an arm that counts, the rounds one after another."""
    return [
        seconds
        for sample in samples
        if sample.arm == arm and not sample.dropped
        for part, seconds in sample.seconds.items()
        if part != STEPS
    ]


def neighbour_findings(run: Run) -> NeighbourFindings:
    """All conclusions of one complete run of the neighbour experiment."""
    predictions = run.header["predictions"]
    of = {name: [s for s in run.final_samples if s.group == name] for name in predictions}
    first = next(iter(predictions))
    return NeighbourFindings(
        run=run,
        points=tuple(
            neighbour_point(name, of[name], predictions[name]["slowdown"]) for name in predictions
        ),
        context=of[first][0].labels["context"],
        num_steps=min(len(step_seconds(samples, BESIDE)) for samples in of.values()),
        num_threads=predictions[first]["num_threads"],
        num_cores=run.header["num_cores"],
        gaps=run.header["gaps"],
    )


def neighbour_point(name: str, samples: Sequence[Sample], predicted: float) -> NeighbourPoint:
    """One format of a run."""
    idle, beside = step_seconds(samples, IDLE), step_seconds(samples, BESIDE)
    return NeighbourPoint(
        name=name,
        idle=describe(idle),
        idle_mean_s=sum(idle) / len(idle),
        beside_mean_s=sum(beside) / len(beside),
        by_round=describe(paired_ratios(samples, BESIDE, IDLE, STEPS)),
        idle_p99_s=supported_percentile(idle, TAIL),
        beside_p99_s=supported_percentile(beside, TAIL),
        predicted=predicted,
    )


def mean_table(findings: NeighbourFindings) -> Table:
    """Every format: the mean step alone and beside the loop."""
    heads = ["format", "idle ms", "beside ms", "beside / idle", "95 %", "predicted", "goal"]
    return heads, [
        [
            point.name,
            milliseconds(point.idle_mean_s),
            milliseconds(point.beside_mean_s),
            times(point.slowdown),
            interval_text(point.by_round),
            f"{times(point.predicted)} ({off(point.predicted, point.slowdown)})",
            f"{GOAL_MEAN:g}x: {'missed' if point.misses_mean else 'reached'}",
        ]
        for point in findings.points
    ]


def tail_table(findings: NeighbourFindings) -> Table:
    """Every format: 99th percentiles over the idle median; a dash where steps were too few."""
    heads = ["format", "idle median ms", "idle p99", "beside p99 ms", "beside p99", "goal"]
    return heads, [
        [
            point.name,
            marked(point.idle),
            ratio_text(point.idle_tail),
            "-" if point.beside_p99_s is None else milliseconds(point.beside_p99_s),
            ratio_text(point.tail),
            "-"
            if point.tail is None
            else f"{GOAL_TAIL:g}x: {'missed' if point.misses_tail else 'reached'}",
        ]
        for point in findings.points
    ]


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else times(ratio)


def neighbour_paragraph(findings: NeighbourFindings) -> str:
    """What the numbers mean on this machine: mean, prediction, tail, goals, noise."""
    means = "; ".join(
        f"{point.name} {times(point.slowdown)} ({milliseconds(point.idle_mean_s)} ms alone, "
        f"{milliseconds(point.beside_mean_s)} ms beside it)"
        for point in findings.points
    )
    parts = [
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
        f"beside one process that only loops, a step of one sequence at context "
        f"{findings.context:,} takes, in the mean and against the idle mean: {means}.",
        prediction_sentence(findings),
        tail_sentence(findings),
        *goal_sentences(findings),
    ]
    parts += [f"There are no arms for {name}: {why}." for name, why in findings.gaps.items()]
    return " ".join([*parts, noise_sentence(findings.run)])


def prediction_sentence(findings: NeighbourFindings) -> str:
    """What a fair share of the processor would make of it, and how far off that is."""
    threads = f"{findings.num_threads} thread{'s' * (findings.num_threads != 1)}"
    cores = f"{findings.num_cores} core{'s' * (findings.num_cores != 1)}"
    offs = ", ".join(
        f"{point.name} {off(point.predicted, point.slowdown)}" for point in findings.points
    )
    return (
        f"A fair share of {cores} for {threads} and the loop, nobody waiting for anybody, would "
        f"make it {times(findings.predicted)} (off by: {offs})."
    )


def tail_sentence(findings: NeighbourFindings) -> str:
    """The slowest step in a hundred, beside the loop and idle, over the idle median."""
    if not findings.tails:
        return (
            f"Of the slowest step in a hundred nothing is said: that needs {min_samples(TAIL)} "
            f"steps, and there are {findings.num_steps}."
        )
    said = "; ".join(
        f"{point.name} {ratio_text(point.tail)} (idle {ratio_text(point.idle_tail)})"
        for point in findings.points
        if point.tail is not None
    )
    return f"The 99th percentile of single steps over the idle median: {said}."


def goal_sentences(findings: NeighbourFindings) -> list[str]:
    """Both goals: reached by all formats, or missed by which; nothing of a tail nobody saw."""
    slow = [point.name for point in findings.points if point.misses_mean]
    said = [f"The mean is to be at most {GOAL_MEAN:g}x: {verdict(slow)}."]
    if unsure := [point.name for point in findings.points if point.is_undecided]:
        said.append(f"Rounds differ too much here to be sure of that in {', '.join(unsure)}.")
    if findings.tails:
        late = [point.name for point in findings.points if point.misses_tail]
        said.append(f"The 99th percentile is to be at most {GOAL_TAIL:g}x: {verdict(late)}.")
    return said


def verdict(missed: Sequence[str]) -> str:
    return f"missed by {', '.join(missed)}" if missed else "reached by all"


def neighbour_numbers(findings: NeighbourFindings) -> dict[str, str]:
    """What prose may quote: each format by its name; a tail only where there is one."""
    return {
        **{f"{point.name}.mean": times(point.slowdown) for point in findings.points},
        **{f"{name}.p99": times(tail) for name, tail in findings.tails.items()},
        "predicted": times(findings.predicted),
    }
