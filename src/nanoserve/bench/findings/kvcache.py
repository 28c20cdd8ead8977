"""What a `kvcache` run says: where the cache wins, by how much, how flat it stays, its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoserve.bench.findings import (
    AACheck,
    Table,
    aa_from_record,
    counted,
    duration_text,
    fastest,
    interval_text,
    machine_name,
    marked,
    milliseconds,
    noise_sentence,
    off,
    rates,
    times,
)
from nanoserve.bench.measure import paired_ratios
from nanoserve.bench.metrics import Distribution, describe, mbu
from nanoserve.bench.record import Run
from nanoserve.planner.memory import format_bytes

FLAT_FROM = 64
"""Flatness compares the largest context with this one, a sixteenth of GPT-2's window."""

WHOLE_TEXT_FROM = 16
"""Tokens of the prompt in the cost of writing a whole window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner said before anything was timed."""

    step_s: float
    num_bytes: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Naive and cached at one context and batch: seconds of a step, and the ratio inside rounds.

    `prefill` is the cached arm's, of `prefill_tokens` per sequence; None where the timed step is
    itself the first. `kv_bytes` are those of the whole batch.
    """

    context: int
    batch: int
    naive: Distribution
    cached: Distribution
    prefill: Distribution | None
    prefill_tokens: int
    speedup: Distribution
    smallest_speedup: float
    naive_predicted: Prediction
    cached_predicted: Prediction
    kv_bytes: int

    @property
    def low_speedup(self) -> float:
        """A bound from below: of the interval, or the smallest ratio where there is none."""
        interval = self.speedup.interval
        return self.smallest_speedup if interval is None else interval.low

    @property
    def predicted_speedup(self) -> float:
        return self.naive_predicted.step_s / self.cached_predicted.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeText:
    """Seconds to write from a prompt of `num_prompt` tokens until the window is full."""

    num_prompt: int
    num_tokens: int
    naive_s: float
    cached_s: float

    @property
    def gain(self) -> float:
        return self.naive_s / self.cached_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheFindings:
    """Everything the kvcache experiment concludes. `wins_from` None: nowhere that was measured."""

    run: Run
    comparisons: tuple[Comparison, ...]
    check: AACheck
    wins_from: int | None
    loses_until: int | None
    predicted_wins_from: int | None
    read_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def single(self) -> list[Comparison]:
        """One sequence, by context."""
        return [c for c in self.comparisons if c.batch == 1]

    @property
    def longest(self) -> Comparison:
        return self.single[-1]

    @property
    def flat_from(self) -> Comparison:
        """The context that the longest is compared with: 64, or the next measured above it."""
        return next((c for c in self.single if c.context >= FLAT_FROM), self.longest)

    @property
    def flatness(self) -> float:
        """Cached step at the longest context over that at `flat_from`."""
        return self.longest.cached.median / self.flat_from.cached.median

    @property
    def flatness_by_bytes(self) -> float:
        """The same ratio if a step took just the time of its bytes: what attention must read."""
        longest, start = self.longest.cached_predicted, self.flat_from.cached_predicted
        return longest.num_bytes / start.num_bytes

    def bandwidth_share(self, comparison: Comparison) -> float:
        """Share of the measured read bandwidth that the cached step reached."""
        num_bytes = comparison.cached_predicted.num_bytes
        return mbu(num_bytes, comparison.cached.median, self.read_bytes_per_s)

    def matmul_share(self, comparison: Comparison) -> float:
        """Share of the measured matmul rate that the naive step reached."""
        reached = comparison.naive_predicted.flops / comparison.naive.median
        return reached / self.matmul_flops_per_s

    @property
    def whole_text(self) -> WholeText:
        """The cost of every position from the prompt on, measured ones joined by straight lines.

        Both begin by computing the prompt; from then on each token costs its own step.
        """
        contexts = [c.context for c in self.single if c.context >= WHOLE_TEXT_FROM]
        naive = [c.naive.median for c in self.single if c.context >= WHOLE_TEXT_FROM]
        cached = [c.cached.median for c in self.single if c.context >= WHOLE_TEXT_FROM]
        return WholeText(
            num_prompt=contexts[0],
            num_tokens=contexts[-1] - contexts[0] + 1,
            naive_s=sum_between(contexts, naive),
            cached_s=naive[0] + sum_between(contexts, cached) - cached[0],
        )


def sum_between(contexts: Sequence[int], values: Sequence[float]) -> float:
    """Sum over every whole context from first to last, linear between the measured ones."""
    total = values[0]
    for (left, low), (right, high) in pairwise(zip(contexts, values, strict=True)):
        # right - left terms, the last of them `high`: an arithmetic series
        steps = right - left
        total += steps * low + (high - low) * (steps + 1) / 2
    return total


def kvcache_findings(run: Run) -> KVCacheFindings:
    """All conclusions of one complete run of the kvcache experiment."""
    samples = run.final_samples
    comparisons = sorted(
        (compare(run, group) for group in run.header["predictions"]),
        key=lambda c: (c.batch, c.context),
    )
    check = aa_from_record(run.checks[-1])
    wins_from, loses_until = crossover(
        [c for c in comparisons if c.batch == 1], check.smallest_effect or 0.0
    )
    found = rates(samples)
    return KVCacheFindings(
        run=run,
        comparisons=tuple(comparisons),
        check=check,
        wins_from=wins_from,
        loses_until=loses_until,
        predicted_wins_from=run.header["predicted_wins_from"],
        read_bytes_per_s=fastest(found, unit="bytes").per_s,
        matmul_flops_per_s=fastest(found, unit="flops", dtype=run.header["dtype"]).per_s,
    )


def compare(run: Run, group: str) -> Comparison:
    """One context and batch of a run."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    steps = counted(samples, "step")
    prefills = counted(samples, "prefill").get((group, "cached"))
    ratios = paired_ratios(samples, "naive", "cached", "step")
    labels = samples[0].labels
    predicted = {
        arm: Prediction(**values) for arm, values in run.header["predictions"][group].items()
    }
    return Comparison(
        context=labels["context"],
        batch=labels["batch"],
        naive=describe(steps[group, "naive"]),
        cached=describe(steps[group, "cached"]),
        prefill=describe(prefills) if prefills else None,
        prefill_tokens=labels["prefill_tokens"],
        speedup=describe(ratios),
        smallest_speedup=min(ratios),
        naive_predicted=predicted["naive"],
        cached_predicted=predicted["cached"],
        kv_bytes=labels["kv_bytes"],
    )


def crossover(
    comparisons: Sequence[Comparison], smallest_effect: float
) -> tuple[int | None, int | None]:
    """(smallest context from which the cache always wins, largest at which it does not yet).

    A win is a ratio whose interval lies above 1 by more than the smallest effect.
    """
    wins_from = loses_until = None
    for comparison in reversed(comparisons):
        if comparison.low_speedup <= 1 + smallest_effect:
            loses_until = comparison.context
            break
        wins_from = comparison.context
    return wins_from, loses_until


def kvcache_table(findings: KVCacheFindings) -> Table:
    """Every context and batch, with the prediction and how far off it was."""
    heads = ["batch"] if len({c.batch for c in findings.comparisons}) > 1 else []
    heads += ["context", "naive ms", "cached ms", "speed-up", "95 %", "predicted", "KV cache"]
    rows = []
    for c in findings.comparisons:
        row = [str(c.batch)] if heads[0] == "batch" else []
        row += [
            f"{c.context:,}",
            marked(c.naive),
            marked(c.cached),
            times(c.speedup.median),
            interval_text(c.speedup),
            f"{times(c.predicted_speedup)} ({off(c.predicted_speedup, c.speedup.median)})",
            format_bytes(c.kv_bytes),
        ]
        rows.append(row)
    return heads, rows


def prediction_table(findings: KVCacheFindings) -> Table:
    """Step times against what the ceilings predicted, and the share of each ceiling reached."""
    heads = [
        "batch",
        "context",
        "naive ms",
        "predicted",
        "of matmul rate",
        "cached ms",
        "predicted",
        "of bandwidth",
        "prefill ms",
    ]
    return heads, [
        [
            str(c.batch),
            f"{c.context:,}",
            milliseconds(c.naive.median),
            predicted_text(c.naive_predicted, c.naive),
            f"{findings.matmul_share(c):.0%}",
            milliseconds(c.cached.median),
            predicted_text(c.cached_predicted, c.cached),
            f"{findings.bandwidth_share(c):.0%}",
            "-"
            if c.prefill is None
            else f"{milliseconds(c.prefill.median)} ({c.prefill_tokens:,})",
        ]
        for c in findings.comparisons
    ]


def predicted_text(predicted: Prediction, measured: Distribution) -> str:
    return f"{milliseconds(predicted.step_s)} ({off(predicted.step_s, measured.median)})"


def kvcache_paragraph(findings: KVCacheFindings) -> str:
    """What the numbers mean on this machine: gain, crossover, flatness, price, noise."""
    longest, text = findings.longest, findings.whole_text
    return " ".join(
        [
            f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
            f"the token at context {longest.context:,} takes "
            f"{milliseconds(longest.naive.median)} ms when everything before it is computed again "
            f"and {milliseconds(longest.cached.median)} ms when keys and values are kept, "
            f"{times(longest.speedup.median)} less.",
            f"There the naive step reaches {findings.matmul_share(longest):.0%} of the measured "
            f"matmul rate, the cached one {findings.bandwidth_share(longest):.0%} of the measured "
            "read bandwidth.",
            crossover_sentence(findings),
            f"From context {findings.flat_from.context:,} to {longest.context:,} a cached step "
            f"grows {findings.flatness:.2f}-fold; the bytes that attention has to read explain "
            f"{findings.flatness_by_bytes:.2f}.",
            f"Writing {text.num_tokens:,} tokens after a prompt of {text.num_prompt} would take "
            f"{duration_text(text.naive_s)} without the cache and {duration_text(text.cached_s)} "
            f"with it ({text.num_tokens / text.cached_s:,.0f} tokens/s).",
            f"The price is memory, {format_bytes(longest.kv_bytes)} for that one sequence, and it "
            "buys nothing for the prompt: prefill is the same work either way.",
            *resident_weights_sentence(findings),
            noise_sentence(findings.run),
            *few_rounds_sentence(findings),
            *unsteady_sentence(findings),
        ]
    )


def unsteady_sentence(findings: KVCacheFindings) -> list[str]:
    """Warns where repetitions of one cell differed too much among themselves."""
    marks = [cell.mark for c in findings.comparisons for cell in (c.naive, c.cached)]
    if not any(marks):
        return []
    return [
        f"Noisy cells: {marks.count('noisy')} of {len(marks)}, invalid ones: "
        f"{marks.count('invalid')}; the machine was not steady meanwhile."
    ]


def few_rounds_sentence(findings: KVCacheFindings) -> list[str]:
    """Says what counts where rounds were too few for an interval."""
    few = [c.speedup.n for c in findings.single if c.speedup.interval is None]
    if not few:
        return []
    rounds = f"{few[0]}" if len(set(few)) == 1 else f"{min(few)} to {max(few)}"
    return [
        f"Where there were only {rounds} rounds, too few for an interval, the smallest ratio seen "
        "decides whether the cache wins."
    ]


def resident_weights_sentence(findings: KVCacheFindings) -> list[str]:
    """Says so where a CPU's last-level cache holds the weights: then memory is not the limit."""
    header = findings.run.header
    caches = header["setup"]["machine"]["caches_bytes"].values()
    num_bytes = findings.single[0].cached_predicted.num_bytes
    if header["device"] != "cpu" or num_bytes > max(caches, default=0):
        return []
    return [
        f"All {format_bytes(num_bytes)} that a step reads fit into the processor's "
        f"{format_bytes(max(caches))} of cache, so it can be faster than memory allows."
    ]


def subject(run: Run) -> str:
    """Model, weights, dtype, executor and threads that really ran."""
    header = run.header
    engine = header["setup"]["engine"]
    threads = f"{engine['threads']} thread{'s' * (engine['threads'] != '1')}"
    return (
        f"{header['model']} ({header['weights']} weights, {header['dtype']}, {header['executor']} "
        f"executor, {engine['device']}, {threads})"
    )


def crossover_sentence(findings: KVCacheFindings) -> str:
    predicted = findings.predicted_wins_from
    said = "nowhere" if predicted is None else f"from {predicted:,} on"
    if findings.wins_from is None:
        return f"The cache does not win at any context measured (predicted: {said})."
    below = findings.loses_until
    until = (
        "" if below is None else f"; at {below:,} the two cannot be told apart or naive is ahead"
    )
    return f"The cache wins from context {findings.wins_from:,} on (predicted: {said}){until}."


def named_numbers(findings: KVCacheFindings) -> dict[str, str]:
    """What prose may quote: name to text, for the README's number blocks."""
    longest, text = findings.longest, findings.whole_text
    return {
        "machine": machine_name(findings.run),
        "subject": subject(findings.run),
        "context": f"{longest.context:,}",
        "speedup": times(longest.speedup.median),
        "naive_ms": milliseconds(longest.naive.median),
        "cached_ms": milliseconds(longest.cached.median),
        "flatness": f"{findings.flatness:.2f}",
        "flatness_by_bytes": f"{findings.flatness_by_bytes:.2f}",
        "wins_from": "-" if findings.wins_from is None else f"{findings.wins_from:,}",
        "kv_bytes": format_bytes(longest.kv_bytes),
        "whole_naive": duration_text(text.naive_s),
        "whole_cached": duration_text(text.cached_s),
        "whole_tokens": f"{text.num_tokens:,}",
        "tokens_per_s": f"{1 / longest.cached.median:,.0f}",
        "paragraph": kvcache_paragraph(findings),
    }
