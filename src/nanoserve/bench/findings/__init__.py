"""What recorded runs say: pure functions from samples to numbers, tables and sentences.

Nothing in this room measures, reads a clock or draws: the same records give the same findings, on
screen, in a plot, in RESULTS.md and in the README. This module holds what every experiment needs
(the A/A check, rates, how numbers are worded), its siblings conclude for one experiment each. A
difference is claimed only where its interval lies beyond what the A/A arm showed to be noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.bench.measure import Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, Interval, describe, median, median_interval
from nanoserve.bench.record import Record, Run
from nanoserve.planner.steptime import Ceilings

Table = tuple[list[str], list[list[str]]]
"""Column heads and rows, all as text, for whoever renders them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AACheck:
    """The same arm against itself: `interval` of the ratio, None with too few samples to say."""

    n: int
    median: float
    interval: Interval | None

    @property
    def is_miss(self) -> bool:
        """The interval leaves out 1: two equal arms were told apart. Expected once in twenty."""
        return self.interval is not None and 1.0 not in self.interval

    @property
    def smallest_effect(self) -> float | None:
        """The smallest relative difference that may be claimed."""
        return None if self.interval is None else self.interval.half_width


def aa_check(samples: Sequence[Sample], arm: str, same_arm: str, part: str) -> AACheck:
    """Paired ratios of one arm run twice, pooled over all groups. Raises ValueError for none."""
    ratios = paired_ratios(samples, same_arm, arm, part)
    return AACheck(n=len(ratios), median=median(ratios), interval=median_interval(ratios))


def aa_values(check: AACheck) -> Record:
    """The check as recorded."""
    interval = check.interval
    return {
        "n": check.n,
        "median": check.median,
        "interval": None if interval is None else [interval.low, interval.high],
        "miss": check.is_miss,
    }


def aa_from_record(record: Record) -> AACheck:
    """Inverse of `aa_values`."""
    bounds = record["interval"]
    interval = None if bounds is None else Interval(low=bounds[0], high=bounds[1])
    return AACheck(n=record["n"], median=record["median"], interval=interval)


def counted(samples: Sequence[Sample], part: str) -> dict[tuple[str, str], list[float]]:
    """Seconds of `part` by (group, arm), dropped rounds left out."""
    found: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if not sample.dropped and part in sample.seconds:
            found.setdefault((sample.group, sample.arm), []).append(sample.seconds[part])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one load reached: its amount (bytes, flops, operations) per second."""

    group: str
    arm: str
    unit: str
    dtype: str | None
    per_s: float
    seconds: Distribution


def rates(samples: Sequence[Sample]) -> list[Rate]:
    """The rate of every load that moved or computed a known amount."""
    labels = {sample.group: sample.labels for sample in samples}
    return [
        Rate(
            group=group,
            arm=arm,
            unit=labels[group]["unit"],
            dtype=labels[group].get("dtype"),
            per_s=labels[group]["amount"] / median(seconds),
            seconds=describe(seconds),
        )
        for (group, arm), seconds in counted(samples, "run").items()
        if "amount" in labels[group]
    ]


def fastest(found: Sequence[Rate], *, unit: str, dtype: str | None = None) -> Rate:
    """The fastest load of a unit (and dtype). Raises ValueError if there was none."""
    return max(
        (rate for rate in found if rate.unit == unit and rate.dtype == dtype),
        key=lambda rate: rate.per_s,
    )


def ceilings_of(samples: Sequence[Sample]) -> Ceilings:
    """The fastest read, the fastest matmul of each dtype, and the cost of a dispatch."""
    found = rates(samples)
    dtypes = sorted({rate.dtype for rate in found if rate.dtype is not None})
    return Ceilings(
        read_bytes_per_s=fastest(found, unit="bytes").per_s,
        matmul_flops_per_s={d: fastest(found, unit="flops", dtype=d).per_s for d in dtypes},
        dispatch_s=1 / fastest(found, unit="operations").per_s,
    )


def ceilings_sentence(run: Run) -> list[str]:
    """The run's own ceilings: those measured between its arms, else what its predictions used."""
    between = [r for r in rates(run.final_samples) if r.group.startswith("ceiling")]
    if between:
        said = ", ".join(map(rate_text, sorted(between, key=lambda rate: rate.unit)))
        return [f"Its own ceilings, measured between the arms: {said}."]
    if "ceilings" not in run.header:
        return []
    found = Ceilings.from_json(run.header["ceilings"])
    matmul = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s ({dtype})" for dtype, rate in found.matmul_flops_per_s.items()
    )
    read = f"{found.read_bytes_per_s / 1e9:,.1f} GB/s read"
    return [f"Its own ceilings, measured before the arms: {read}, {matmul}."]


def rate_text(rate: Rate) -> str:
    """A rate in the unit people use for it."""
    if rate.unit == "bytes":
        return f"{rate.per_s / 1e9:,.1f} GB/s read"
    if rate.unit == "flops":
        return f"{rate.per_s / 1e9:,.0f} GFLOP/s ({rate.dtype})"
    return f"{1e6 / rate.per_s:.2f} µs a dispatch"


def machine_name(run: Run) -> str:
    """Processor and cores, as one would say it."""
    machine = run.header["setup"]["machine"]
    return f"{machine['cpu']} ({machine['cores']} cores)"


def noise_sentence(run: Run) -> str:
    """What the A/A arm allows to be claimed."""
    effect = aa_from_record(run.checks[-1]).smallest_effect
    if effect is None:
        return "Too few repetitions to say how small a difference could be seen."
    again = " (a first attempt told two equal arms apart and was repeated)" * (len(run.checks) > 1)
    return f"Differences under {effect:.1%} are noise here{again}."


def milliseconds(seconds: float) -> str:
    """Milliseconds with three or so significant digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def off(predicted: float, measured: float) -> str:
    """How far a prediction was from what was measured, in per cent of the latter."""
    text = f"{(predicted - measured) / measured:+.0%}"
    return "0%" if text in ("+0%", "-0%") else text


def marked(distribution: Distribution) -> str:
    mark = f" {distribution.mark}" if distribution.mark else ""
    return milliseconds(distribution.median) + mark


def interval_text(distribution: Distribution) -> str:
    interval = distribution.interval
    if interval is None:
        return f"n = {distribution.n}"
    return f"{times(interval.low)[:-1]}-{times(interval.high)}"


def duration_text(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.1f} minutes"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
