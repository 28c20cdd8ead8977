"""What a `batch` run says: how the step grows with the batch, where that begins to hurt, the gain.

The knee is the batch at which a step takes `KNEE` times as long as that of one sequence, straight
between the batches measured. (The textbook's corner, where the line of computing meets the floor of
reading the weights, is not defined where a matrix product of two rows runs another kernel than that
of one.) Measured and predicted knees are the same function of their step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoserve.bench.findings import (
    Table,
    counted,
    fastest,
    machine_name,
    marked,
    milliseconds,
    noise_sentence,
    off,
    rates,
    times,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import paired_ratios
from nanoserve.bench.metrics import Distribution, describe, mbu
from nanoserve.bench.record import Run

KNEE = 1.5
"""Up to a step of this many times one sequence's, more sequences are called free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """One batch size at one context; `slowdown` is its step over that of one sequence, by round."""

    batch: int
    step: Distribution
    slowdown: Distribution
    predicted_s: float
    num_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return self.batch / self.step.median

    @property
    def tokens_per_s_each(self) -> float:
        return 1 / self.step.median


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCurve:
    """All batch sizes at one context, smallest first. A knee of None: not reached."""

    context: int
    kv_bytes_per_sequence: int
    points: tuple[BatchPoint, ...]
    knee: float | None
    predicted_knee: float | None

    @property
    def gain(self) -> float:
        """Tokens per second of the largest batch over those of one sequence."""
        last = self.points[-1]
        return last.batch / last.slowdown.median

    @property
    def marginal_s(self) -> float:
        """Seconds that one more sequence adds to a large step: the slope between the last two."""
        before, last = self.points[-2:]
        return (last.step.median - before.step.median) / (last.batch - before.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFindings:
    """Everything the batch experiment concludes."""

    run: Run
    curves: tuple[BatchCurve, ...]
    read_bytes_per_s: float

    @property
    def main(self) -> BatchCurve:
        """The shortest context: there a sequence adds the least of its own."""
        return self.curves[0]

    def bandwidth_share(self, point: BatchPoint) -> float:
        return mbu(point.num_bytes, point.step.median, self.read_bytes_per_s)


def find_knee(
    batches: Sequence[int], seconds: Sequence[float], limit: float = KNEE
) -> float | None:
    """The batch at which a step takes `limit` times that of the first; None if it never does."""
    wanted = limit * seconds[0]
    measured = zip(batches, seconds, strict=True)
    for (left, low), (right, high) in pairwise(measured):
        if high >= wanted:
            return left + (wanted - low) / (high - low) * (right - left)
    return None


def batch_findings(run: Run) -> BatchFindings:
    """All conclusions of one complete run of the batch experiment."""
    found = rates(run.final_samples)
    curves = [batch_curve(run, group) for group in run.header["predictions"]]
    return BatchFindings(
        run=run,
        curves=tuple(sorted(curves, key=lambda curve: curve.context)),
        read_bytes_per_s=fastest(found, unit="bytes").per_s,
    )


def batch_curve(run: Run, group: str) -> BatchCurve:
    """One context of a run."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    labels, steps = samples[0].labels, counted(samples, "step")
    predicted = run.header["predictions"][group]
    arms = sorted(labels["batches"].items(), key=lambda item: item[1])
    points = [
        BatchPoint(
            batch=batch,
            step=describe(steps[group, arm]),
            slowdown=describe(paired_ratios(samples, arm, arms[0][0], "step")),
            predicted_s=predicted[arm]["step_s"],
            num_bytes=predicted[arm]["num_bytes"],
        )
        for arm, batch in arms
    ]
    batches = [point.batch for point in points]
    return BatchCurve(
        context=labels["context"],
        kv_bytes_per_sequence=labels["kv_bytes_per_sequence"],
        points=tuple(points),
        knee=find_knee(batches, [point.step.median for point in points]),
        predicted_knee=find_knee(batches, [point.predicted_s for point in points]),
    )


def batch_table(findings: BatchFindings) -> Table:
    """Every context and batch."""
    heads = [
        "context",
        "batch",
        "step ms",
        "predicted",
        "against one",
        "tok/s in all",
        "tok/s each",
        "of bandwidth",
    ]
    return heads, [
        [
            f"{curve.context:,}",
            str(point.batch),
            marked(point.step),
            f"{milliseconds(point.predicted_s)} ({off(point.predicted_s, point.step.median)})",
            times(point.slowdown.median),
            f"{point.tokens_per_s:,.1f}",
            f"{point.tokens_per_s_each:,.1f}",
            f"{findings.bandwidth_share(point):.0%}",
        ]
        for curve in findings.curves
        for point in curve.points
    ]


def knee_text(knee: float | None, largest: int) -> str:
    return f"beyond {largest}" if knee is None else f"{knee:.1f}"


def batch_paragraph(findings: BatchFindings) -> str:
    """What the numbers mean on this machine: knee, gain, what one more sequence costs, noise."""
    curve = findings.main
    first, last = curve.points[0], curve.points[-1]
    parts = [
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
        f"a decode step of one sequence takes {milliseconds(first.step.median)} ms at context "
        f"{curve.context:,}, of {last.batch} sequences {milliseconds(last.step.median)} ms, "
        f"{times(last.slowdown.median)} as long for {last.batch} times the tokens: "
        f"{curve.gain:.1f} times as many per second in all, and each sequence waits "
        f"{times(last.slowdown.median)} as long for its next.",
        "The knee, where a step takes "
        f"{KNEE:g} times that of one sequence, is at batch "
        f"{knee_text(curve.knee, last.batch)} (predicted from the ceilings: "
        f"{knee_text(curve.predicted_knee, last.batch)}).",
        f"In a large batch one more sequence adds {milliseconds(curve.marginal_s)} ms, "
        f"{curve.marginal_s / first.step.median:.0%} of what it costs alone.",
    ]
    parts += [
        f"At context {other.context:,} the knee is at {knee_text(other.knee, last.batch)} "
        f"(predicted: {knee_text(other.predicted_knee, last.batch)}) and {last.batch} sequences "
        f"gain {other.gain:.1f}."
        for other in findings.curves[1:]
    ]
    return " ".join([*parts, noise_sentence(findings.run)])


def batch_numbers(findings: BatchFindings) -> dict[str, str]:
    """What prose may quote."""
    curve = findings.main
    last = curve.points[-1]
    return {
        "largest": str(last.batch),
        "knee": knee_text(curve.knee, last.batch),
        "predicted_knee": knee_text(curve.predicted_knee, last.batch),
        "gain": f"{curve.gain:.1f}",
        "tokens_per_s": f"{last.tokens_per_s:,.0f}",
        "paragraph": batch_paragraph(findings),
    }
