"""What an `interference` run says: gaps by token budget, the automatic budget, prefixes shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
    counted,
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
from nanoserve.planner.budget import MAX_GAP_RATIO

GAPS, SHARED = "a long prompt", "a shared prefix"
GOAL_WARM = 0.2
"""A prompt whose prefix is known is to begin within this share of the time of one that is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPoint:
    """One budget: the longest gap over the plain decode step, in each repetition."""

    budget: int
    decode: Distribution
    gap: Distribution
    ttft: Distribution
    ratio: Distribution
    predicted_ratio: float
    num_chunks: int

    @property
    def meets_goal(self) -> bool:
        return self.ratio.median <= MAX_GAP_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFindings:
    """Everything the interference experiment concludes. `warm_share` is warm over cold TTFT.

    `auto_budget` is the engine's own choice; `fitted_budget` what the fitted step costs would say.
    """

    run: Run
    streams: int
    long_prompt: int
    points: tuple[GapPoint, ...]
    auto_budget: int
    fitted_budget: int
    prefix: int
    cold: Distribution
    warm: Distribution
    warm_share: Distribution

    @property
    def automatic(self) -> GapPoint:
        """The automatic budget's point; it is always among those measured."""
        return next(point for point in self.points if point.budget == self.auto_budget)

    @property
    def largest_that_keeps(self) -> int | None:
        """The largest budget measured that keeps the ratio, and all below it do; None: not one."""
        kept = None
        for point in self.points:
            if not point.meets_goal:
                break
            kept = point.budget
        return kept


def interference_findings(run: Run) -> InterferenceFindings:
    """All conclusions of one complete run of the interference experiment."""
    samples = run.final_samples
    labels = {sample.group: sample.labels for sample in samples}
    shared = [sample for sample in samples if sample.group == SHARED]
    ttft = counted(shared, "ttft")
    budgets = sorted(labels[GAPS]["budgets"].items(), key=lambda item: item[1])
    return InterferenceFindings(
        run=run,
        streams=labels[GAPS]["streams"],
        long_prompt=labels[GAPS]["long_prompt"],
        points=tuple(gap_point(run, samples, arm, budget) for arm, budget in budgets),
        auto_budget=labels[SHARED]["budget"],
        fitted_budget=run.header["fitted_budget"],
        prefix=labels[SHARED]["prefix"],
        cold=describe(ttft[SHARED, "cold"]),
        warm=describe(ttft[SHARED, "warm"]),
        warm_share=describe(paired_ratios(shared, "warm", "cold", "ttft")),
    )


def gap_point(run: Run, samples: Sequence[Sample], arm: str, budget: int) -> GapPoint:
    """One budget of a run."""
    own = [s for s in samples if (s.group, s.arm) == (GAPS, arm) and not s.dropped]
    predicted = run.header["predictions"][arm]
    return GapPoint(
        budget=budget,
        decode=describe([s.seconds["decode"] for s in own]),
        gap=describe([s.seconds["gap"] for s in own]),
        ttft=describe([s.seconds["ttft"] for s in own]),
        ratio=describe([s.seconds["gap"] / s.seconds["decode"] for s in own]),
        predicted_ratio=predicted["gap_s"] / predicted["decode_s"],
        num_chunks=predicted["num_chunks"],
    )


def gap_table(findings: InterferenceFindings) -> Table:
    """Every budget: decode step, longest gap, their ratio and its prediction, the prompt's TTFT."""
    heads = ["budget", "chunks", "decode ms", "longest gap ms", "ratio", "predicted", "TTFT ms"]
    return heads, [
        [
            f"auto: {point.budget}" if point.budget == findings.auto_budget else str(point.budget),
            str(point.num_chunks),
            marked(point.decode),
            marked(point.gap),
            times(point.ratio.median),
            f"{times(point.predicted_ratio)} ({off(point.predicted_ratio, point.ratio.median)})",
            milliseconds(point.ttft.median),
        ]
        for point in findings.points
    ]


def automatic_text(findings: InterferenceFindings) -> str:
    """The budget an engine takes by itself, and where it comes from."""
    ratio = times(findings.automatic.ratio.median)
    if findings.auto_budget == findings.fitted_budget:
        return f"The automatic one, by step costs fitted here, is {findings.auto_budget}: {ratio}."
    return (
        f"The automatic budget is {findings.auto_budget}: {ratio}; step costs fitted here would "
        f"allow {findings.fitted_budget}."
    )


def interference_paragraph(findings: InterferenceFindings) -> str:
    """What a long prompt costs the others here, and what a shared prefix saves."""
    kept = findings.largest_that_keeps
    keeps = "no budget measured keeps" if kept is None else f"budgets up to {kept} keep"
    reached = "reaches" if findings.warm_share.median <= GOAL_WARM else "misses"
    return (
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}: while a "
        f"prompt of {findings.long_prompt:,} tokens is computed beside {findings.streams} streams, "
        f"{keeps} the longest gap within {MAX_GAP_RATIO:g} decode steps. "
        f"{automatic_text(findings)} A prompt whose first {findings.prefix:,} tokens are cached "
        f"begins after {milliseconds(findings.warm.median)} ms instead of "
        f"{milliseconds(findings.cold.median)} ms, {findings.warm_share.median:.2f} of the time, "
        f"which {reached} the goal of {GOAL_WARM:g}. {noise_sentence(findings.run)}"
    )
