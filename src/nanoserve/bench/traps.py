"""Ways to get a confidently wrong number from an inference benchmark, as the report tells them.

Each says what the mistake looks like, by how much it misleads where a record here can tell, and how
this code keeps out of it. The texts hold no measured number: what `measured` adds is computed from
the findings at hand, and it adds nothing where they do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.bench.findings import duration_text, milliseconds, times
from nanoserve.bench.findings.interference import InterferenceFindings
from nanoserve.bench.findings.kvcache import KVCacheFindings
from nanoserve.planner.memory import format_bytes

Findings = Mapping[str, Sequence[Any]]
"""By experiment, the main run first."""

TRAPS_TITLE = "Traps: how to be confidently wrong"
TRAPS_INTRODUCTION = (
    "Every one of these gives a number that repeats well and means something else. Where the "
    "records above can say by how much, they do."
)


def nothing_measured(_: Findings) -> list[str]:
    """No record here tells how far this one leads astray."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """What a mistake looks like, how it is avoided here, and what records say of its size."""

    name: str
    looks: str
    avoided: str
    measured: Callable[[Findings], list[str]] = nothing_measured


def first(findings: Findings, experiment: str) -> list[Any]:
    """The main run's findings, if there are any."""
    return list(findings.get(experiment, ())[:1])


def prefill_as_decode(findings: Findings) -> list[str]:
    """What one prefill weighs in steps."""
    return [
        f"Here one prefill of {longest.prefill_tokens:,} tokens takes "
        f"{milliseconds(longest.prefill.median)} ms, as long as "
        f"{longest.prefill.median / longest.cached.median:.0f} cached steps: an answer of so many "
        "tokens, divided by all of its time, shows half the speed of decoding."
        for found in first(findings, "kvcache")
        for longest in [found.longest]
        if longest.prefill is not None
    ]


def mean_of_ratios(findings: Findings) -> list[str]:
    """The mean gain over contexts against the gain of a whole text."""
    return [mean_of_ratios_sentence(found) for found in first(findings, "kvcache")]


def mean_of_ratios_sentence(found: KVCacheFindings) -> str:
    ratios = [comparison.speedup.median for comparison in found.single]
    text = found.whole_text
    return (
        f"Here the mean of the gains at {len(ratios)} contexts is "
        f"{times(sum(ratios) / len(ratios))}, while a whole text takes {times(text.gain)} as long "
        f"without the cache ({duration_text(text.naive_s)} against "
        f"{duration_text(text.cached_s)})."
    )


def unread_logits(findings: Findings) -> list[str]:
    """Bytes of a full window's logits: arithmetic on the model that was measured."""
    sentences = []
    for found in first(findings, "kvcache"):
        config = found.run.header["setup"]["model_config"]
        num_bytes = 4 * config["n_positions"] * config["vocab_size"]
        sentences.append(
            f"For {found.run.header['model']} a full window has {format_bytes(num_bytes)} of them "
            f"in fp32, against {format_bytes(found.longest.kv_bytes)} of keys and values."
        )
    return sentences


def shared_prefix(findings: Findings) -> list[str]:
    return [shared_prefix_sentence(found) for found in first(findings, "interference")]


def shared_prefix_sentence(found: InterferenceFindings) -> str:
    return (
        f"Here a prompt that shares its first {found.prefix:,} tokens with an earlier one begins "
        f"after {milliseconds(found.warm.median)} ms instead of "
        f"{milliseconds(found.cold.median)} ms."
    )


def apart_in_time(findings: Findings) -> list[str]:
    """How unsteady one cell is, against what interleaving makes of it."""
    sentences = []
    for found in first(findings, "kvcache"):
        effect = found.check.smallest_effect
        if effect is not None:
            spreads = [cell.spread for c in found.comparisons for cell in (c.naive, c.cached)]
            sentences.append(
                f"Here the repetitions of one and the same step spread by up to {max(spreads):.0%} "
                f"(inter-quartile range over median), and yet ratios taken inside rounds tell "
                f"differences of {effect:.1%} from noise."
            )
    return sentences


TRAPS = (
    Trap(
        name="The cache is allocated inside the timed region",
        looks="The first step of every request looks dear and the cached arm worse than it is: "
        "the system hands out pages at their first touch, and that is what was timed.",
        avoided="Every buffer is allocated once and touched, every shape runs before anything is "
        "timed; loading and first touch have times of their own.",
    ),
    Trap(
        name="Prefill is counted as decoding",
        looks='"Tokens per second" of a whole request depends on the length of its prompt.',
        measured=prefill_as_decode,
        avoided="Prefill and step are timed under their own names, each at an exact context.",
    ),
    Trap(
        name="A cache that grows by concatenation",
        looks="Each step copies all of the past, so time rises with context and the cache seems "
        "to stop helping; what was measured is the copy.",
        avoided="Caches are preallocated and written in place; the table says how much a step "
        "grows from a short to a long context, beside what its bytes explain.",
    ),
    Trap(
        name="Logits that nobody reads",
        looks="A prefill that passes every position through the head spends time and memory on "
        "rows of which the last alone is sampled.",
        measured=unread_logits,
        avoided="Rows of logits are computed where they are asked for; the naive arm, too, has "
        "the last one only, or it would be slow for a reason that is not the cache's.",
    ),
    Trap(
        name="Asynchronous work",
        looks="On a GPU a call returns when its work is queued. Without a synchronisation the "
        "clock measures the queue, and everything is fast alike.",
        avoided="The clock is read with the device idle, before and after.",
    ),
    Trap(
        name="One question to the device per slot and step",
        looks="Reading each sampled token by itself waits for the device once a sequence: the "
        "step grows with the batch, and batching seems to gain little.",
        avoided="A step has a single crossing to the host, where all its tokens are.",
    ),
    Trap(
        name="Arms measured one after the other",
        looks="First one, then the other: whatever the machine did in between counts as a "
        "difference, with a small standard deviation on both sides.",
        measured=apart_in_time,
        avoided="Arms take turns in rounds of shuffled order, ratios are taken inside a round, "
        "and one arm runs against itself: what it shows of a difference is noise, and no "
        "smaller one is claimed.",
    ),
    Trap(
        name="Averages of ratios",
        looks="The mean of speed-ups weighs a step that takes no time like one that takes all of "
        "it. The same holds for a mean of rates.",
        measured=mean_of_ratios,
        avoided="Ratios are medians of one cell; over cells only sums are divided by sums.",
    ),
    Trap(
        name="Prefix caching left on",
        looks="A benchmark that sends one prompt again and again measures a look-up: time to the "
        "first token collapses from the second repetition on.",
        measured=shared_prefix,
        avoided="Prefix caching is off unless it is the question.",
    ),
    Trap(
        name="Coordinated omission",
        looks="A client that waits for an answer before it sends again asks less of a slow "
        "server; the requests that would have waited are not there to be counted.",
        avoided="Schedules are made beforehand and are open: latency counts from the time at "
        "which a request was due, and the sender's own lag is recorded.",
    ),
    Trap(
        name="Chunks counted as tokens",
        looks="A server may put several tokens into one event, or none; a client that counts "
        "events finds another speed than the server has.",
        avoided="Tokens come from the usage that the server reports and are compared with the "
        "text that the offline arm wrote.",
    ),
    Trap(
        name="Two thread pools on the same cores",
        looks="Two libraries that each start a thread for every core stand in each other's way; "
        "the one that is asked second looks slow.",
        avoided="The number of threads is set and recorded, yardsticks and arms never run at the "
        "same time, and the server's client runs in a process of its own.",
    ),
    Trap(
        name="Out of memory by reservation",
        looks="An allocator that keeps what it freed answers a later probe with an error though "
        "half of the memory is unused; the ceiling found is that of the probes before.",
        avoided="Each probe of a memory ceiling is a fresh process, its prediction is stored "
        "before, and the largest pass is recorded beside the smallest failure.",
    ),
)
