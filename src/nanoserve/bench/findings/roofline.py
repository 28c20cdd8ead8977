"""What a `roofline` run says: how long a step takes against the time that its bytes alone need.

The limit of a repetition is bytes over the bandwidth that the read probe reached in the same round:
weights once, keys and values of the context. A step of a large batch is bound by its operations
instead, which the prediction (the planner's, from ceilings measured before) accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
    aa_from_record,
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
from nanoserve.bench.measure import paired_ratios
from nanoserve.bench.metrics import Distribution, describe
from nanoserve.bench.record import Run

READ = "read"

GOALS = {"float32": 1.15, "bfloat16": 1.15, "int8": 1.25, "int4": 1.5}
"""Of one sequence: a step should take at most so many times the time of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One format at one batch; `over_limit` is its step over the time of its bytes, by round."""

    name: str
    weights: str
    kv: str
    batch: int
    step: Distribution
    over_limit: Distribution
    predicted_s: float
    num_bytes: int
    flops: int

    @property
    def bandwidth_share(self) -> float:
        return 1 / self.over_limit.median

    @property
    def intensity(self) -> float:
        """Operations for each byte that must move."""
        return self.flops / self.num_bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.step.median

    @property
    def goal(self) -> float | None:
        return GOALS.get(self.name) if self.batch == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineFindings:
    """Everything the roofline experiment concludes; points by batch, in the order of formats."""

    run: Run
    points: tuple[RooflinePoint, ...]
    read_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]
    gaps: Mapping[str, str]

    def of_batch(self, batch: int) -> list[RooflinePoint]:
        return [point for point in self.points if point.batch == batch]

    @property
    def with_goals(self) -> list[RooflinePoint]:
        return [point for point in self.points if point.goal is not None]

    @property
    def correction(self) -> float:
        """1, or how many times faster than the probe the fastest step read its bytes.

        No step reads faster than memory is, so the probe was then the slower of the two, and goals
        are held against the step's rate: every ratio to the probe flatters by at least this.
        """
        return max(1.0, *(point.bandwidth_share for point in self.points))

    def meets_goal(self, point: RooflinePoint) -> bool:
        """Whether the goal is reached even by the faster yardstick."""
        return point.goal is not None and point.over_limit.median * self.correction <= point.goal

    @property
    def batches(self) -> list[int]:
        return sorted({point.batch for point in self.points})


def roofline_findings(run: Run) -> RooflineFindings:
    """All conclusions of one complete run of the roofline experiment."""
    points = [
        roofline_point(run, group, name)
        for group, predicted in run.header["predictions"].items()
        for name in predicted
    ]
    reads = [
        seconds
        for (group, arm), found in counted(run.final_samples, "step").items()
        if arm == READ and group in run.header["predictions"]
        for seconds in found
    ]
    read_bytes = next(
        s.labels["read_bytes"]
        for s in run.final_samples
        if s.arm == READ and "read_bytes" in s.labels
    )
    return RooflineFindings(
        run=run,
        points=tuple(sorted(points, key=lambda point: point.batch)),
        read_bytes_per_s=read_bytes / describe(reads).median,
        matmul_flops_per_s=run.header["ceilings"]["matmul_flops_per_s"],
        gaps=run.header["gaps"],
    )


def roofline_point(run: Run, group: str, name: str) -> RooflinePoint:
    """One format at one batch of a run."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    labels, predicted = samples[0].labels, run.header["predictions"][group][name]
    # a round's limit is read_s x num_bytes / read_bytes
    factor = labels["read_bytes"] / predicted["num_bytes"]
    ratios = [ratio * factor for ratio in paired_ratios(samples, name, READ, "step")]
    return RooflinePoint(
        name=name,
        **run.header["formats"][name],
        batch=labels["batch"],
        step=describe(counted(samples, "step")[group, name]),
        over_limit=describe(ratios),
        predicted_s=predicted["step_s"],
        num_bytes=predicted["num_bytes"],
        flops=predicted["flops"],
    )


def roofline_table(findings: RooflineFindings) -> Table:
    """Every format and batch."""
    heads = [
        "batch",
        "format",
        "step ms",
        "predicted",
        "MB to move",
        "over its bytes",
        "95 %",
        "of bandwidth",
        "GFLOP/s",
        "goal",
    ]
    return heads, [
        [
            str(point.batch),
            point.name,
            marked(point.step),
            f"{milliseconds(point.predicted_s)} ({off(point.predicted_s, point.step.median)})",
            f"{point.num_bytes / 1e6:,.0f}",
            times(point.over_limit.median),
            interval_text(point.over_limit),
            f"{point.bandwidth_share:.0%}",
            f"{point.flops_per_s / 1e9:,.0f}",
            "-" if point.goal is None else goal_text(findings, point),
        ]
        for point in findings.points
    ]


def goal_text(findings: RooflineFindings, point: RooflinePoint) -> str:
    """The goal, and whether it was reached."""
    return f"{point.goal:g}x: {'reached' if findings.meets_goal(point) else 'missed'}"


def roofline_paragraph(findings: RooflineFindings) -> str:
    """What the numbers mean on this machine: who is how far from the limit, where, and goals."""
    parts = [
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
        f"memory is read at {findings.read_bytes_per_s / 1e9:.1f} GB/s in the rounds of the steps.",
    ]
    for batch in findings.batches:
        points = sorted(findings.of_batch(batch), key=lambda point: point.over_limit.median)
        nearest, farthest = points[0], points[-1]
        sequences = "one sequence" if batch == 1 else f"{batch} sequences"
        parts.append(
            f"A step of {sequences} takes {times(nearest.over_limit.median)} the time of its bytes "
            f"in {nearest.name} ({milliseconds(nearest.step.median)} ms)"
            + (
                "."
                if nearest is farthest
                else f", the nearest, and {times(farthest.over_limit.median)} in {farthest.name} "
                f"({milliseconds(farthest.step.median)} ms), the farthest."
            )
        )
    parts += [*correction_sentence(findings), *goals_sentence(findings)]
    parts += [f"There is no arm {name}: {why}." for name, why in findings.gaps.items()]
    return " ".join([*parts, noise_sentence(findings.run)])


def correction_sentence(findings: RooflineFindings) -> list[str]:
    """Says so where a step beat the probe: the yardstick was too short, not the step too good."""
    if findings.correction <= 1 + (aa_from_record(findings.run.checks[-1]).smallest_effect or 0):
        return []
    return [
        f"The fastest step moved its bytes {times(findings.correction)} as fast as the read probe, "
        "which memory cannot do: the probe fell short here, or a cache held part of them. Every "
        "ratio to it flatters by at least that, and goals are held against the step's rate."
    ]


def goals_sentence(findings: RooflineFindings) -> list[str]:
    """Which of the goals for one sequence were reached, by the faster yardstick."""
    if not findings.with_goals:
        return []
    said = [
        f"{point.name} {times(point.over_limit.median * findings.correction)} of at most "
        f"{point.goal:g}x"
        for point in findings.with_goals
    ]
    missed = [point.name for point in findings.with_goals if not findings.meets_goal(point)]
    verdict = f"missed by {', '.join(missed)}" if missed else "all reached"
    return [f"Goals for one sequence: {'; '.join(said)}: {verdict}."]


def roofline_numbers(findings: RooflineFindings) -> dict[str, str]:
    """What prose may quote: each format of one sequence by its name."""
    single = {point.name: point for point in findings.of_batch(1)}
    return {
        **{f"{name}.over_limit": times(point.over_limit.median) for name, point in single.items()},
        **{f"{name}.ms": milliseconds(point.step.median) for name, point in single.items()},
        "paragraph": roofline_paragraph(findings),
    }
