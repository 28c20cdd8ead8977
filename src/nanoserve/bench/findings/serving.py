"""What a `serving` run says: the share of the offline throughput that is left behind HTTP, what a
token costs beyond the engine, how soon it is on the wire, and what a long life leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
    aa_from_record,
    machine_name,
    milliseconds,
    noise_sentence,
    off,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, describe
from nanoserve.bench.record import Record, Run
from nanoserve.planner.memory import format_bytes

OFFLINE, HTTP = "offline", "http"
GOAL_SHARE = 0.9
"""Through HTTP at least this share of the same engine's offline throughput is to be reached."""

GOAL_DELIVERY_S = 10e-3
"""99 % of the tokens are to be on the wire within this time of their birth."""

GOAL_BEYOND_S = 80e-6
"""Beyond the engine's thread the server is to need at most this per streamed token."""

GOAL_GROWTH = 0.02
"""Memory may grow by at most this share from the settled server to the end of all requests."""


def beyond_engine_s(seconds: Mapping[str, float], threads: int) -> float:
    """Processor time of the server that is not the engine's.

    With several computing threads those are not told apart from the rest of the process, so only
    the event loop's thread counts, where all of HTTP happens.
    """
    if threads == 1:
        return seconds["server cpu"] - seconds["engine cpu"]
    return seconds["event loop cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """So many streams at once. Times are of whole repetitions, costs per token, all in seconds.

    `share` is the offline time over the one through HTTP, inside rounds. `delivery_p99` is None
    where a repetition has too few tokens for a 99th percentile; `worst_p99` is its largest.
    """

    streams: int
    prompt: int
    output: int
    num_tokens: int
    threads: int
    offline: Distribution
    http: Distribution
    share: Distribution
    predicted_share: float
    delivery_p50: Distribution
    delivery_p99: Distribution | None
    worst_p99: float | None
    predicted_delivery_s: float
    engine_offline: Distribution
    engine_http: Distribution
    beyond: Distribution
    client: Distribution

    @property
    def offline_tokens_per_s(self) -> float:
        return self.num_tokens / self.offline.median

    @property
    def http_tokens_per_s(self) -> float:
        return self.num_tokens / self.http.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Endurance:
    """What the server lived through before it was timed. Bytes are None where nobody tells them."""

    num_settling: int
    num_short: int
    settled_bytes: int | None
    final_bytes: int | None
    num_leaving: int
    num_left: int
    gauges: Mapping[str, float]

    @property
    def growth_bytes(self) -> int | None:
        if self.settled_bytes is None or self.final_bytes is None:
            return None
        return self.final_bytes - self.settled_bytes

    @property
    def is_flat(self) -> bool:
        growth, settled = self.growth_bytes, self.settled_bytes
        return growth is None or settled is None or growth <= GOAL_GROWTH * settled

    @property
    def left_nothing(self) -> bool:
        return not any(self.gauges.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFindings:
    """Everything the serving experiment concludes; the first point has the most streams."""

    run: Run
    points: tuple[LoadPoint, ...]
    endurance: Endurance

    @property
    def main(self) -> LoadPoint:
        return self.points[0]

    @property
    def lightest(self) -> LoadPoint:
        """The fewest streams: there the time to the wire is held to its goal."""
        return self.points[-1]


def serving_findings(run: Run) -> ServingFindings:
    """All conclusions of one complete run of the serving experiment."""
    samples = [sample for sample in run.final_samples if not sample.dropped]
    names = {sample.group: sample.labels["streams"] for sample in samples}
    points = [
        load_point([s for s in samples if s.group == name], run.header["predictions"][name])
        for name in sorted(names, key=names.__getitem__, reverse=True)
    ]
    return ServingFindings(
        run=run, points=tuple(points), endurance=read_endurance(run.header["endurance"])
    )


def load_point(samples: Sequence[Sample], predicted: Record) -> LoadPoint:
    """One group of a run."""
    labels = samples[0].labels
    offline = [s.seconds for s in samples if s.arm == OFFLINE]
    http = [s.seconds for s in samples if s.arm == HTTP]
    p99 = [seconds["delivery p99"] for seconds in http if "delivery p99" in seconds]
    threads, num_tokens = labels["threads"], labels["num_tokens"]

    def per_token(seconds: Sequence[float]) -> Distribution:
        return describe([value / num_tokens for value in seconds])

    return LoadPoint(
        streams=labels["streams"],
        prompt=labels["prompt"],
        output=labels["output"],
        num_tokens=num_tokens,
        threads=threads,
        offline=describe([seconds["run"] for seconds in offline]),
        http=describe([seconds["run"] for seconds in http]),
        share=describe(paired_ratios(samples, OFFLINE, HTTP, "run")),
        predicted_share=predicted["share"],
        delivery_p50=describe([seconds["delivery p50"] for seconds in http]),
        delivery_p99=describe(p99) if p99 else None,
        worst_p99=max(p99, default=None),
        predicted_delivery_s=predicted["delivery_s"],
        engine_offline=per_token([seconds["engine cpu"] for seconds in offline]),
        engine_http=per_token([seconds["engine cpu"] for seconds in http]),
        beyond=per_token([beyond_engine_s(seconds, threads) for seconds in http]),
        client=per_token([seconds["client cpu"] for seconds in http]),
    )


def read_endurance(record: Record) -> Endurance:
    """As the header holds it."""
    settled, final = record["anonymous_bytes"]
    return Endurance(
        num_settling=record["num_settling"],
        num_short=record["num_short"],
        settled_bytes=settled,
        final_bytes=final,
        num_leaving=record["num_leaving"],
        num_left=record["num_left"],
        gauges=record["gauges"],
    )


def throughput_table(findings: ServingFindings) -> Table:
    """Every load: tokens per second offline and through HTTP, and the latter's share."""
    heads = ["streams", "tokens each", "offline tok/s", "HTTP tok/s"]
    heads += ["share, paired", "95 %", "predicted"]
    return heads, [
        [
            str(point.streams),
            str(point.output),
            with_mark(f"{point.offline_tokens_per_s:,.0f}", point.offline),
            with_mark(f"{point.http_tokens_per_s:,.0f}", point.http),
            f"{point.share.median:.1%}",
            share_interval(point.share),
            f"{point.predicted_share:.1%} ({off(point.predicted_share, point.share.median)})",
        ]
        for point in findings.points
    ]


def share_interval(share: Distribution) -> str:
    interval = share.interval
    return f"n = {share.n}" if interval is None else f"{interval.low:.1%}-{interval.high:.1%}"


def delivery_table(findings: ServingFindings) -> Table:
    """Every load: milliseconds from a token's birth to the wire."""
    heads = ["streams", "p50 ms", "p99 ms", "worst p99 ms", "predicted ms"]
    return heads, [
        [
            str(point.streams),
            milliseconds(point.delivery_p50.median),
            "-" if point.delivery_p99 is None else milliseconds(point.delivery_p99.median),
            "-" if point.worst_p99 is None else milliseconds(point.worst_p99),
            milliseconds(point.predicted_delivery_s),
        ]
        for point in findings.points
    ]


def cost_table(findings: ServingFindings) -> Table:
    """Every load: whose processor time a token costs, in microseconds."""
    heads = ["streams", "engine's thread, offline", "the same, HTTP", "beyond it", "client"]
    return heads, [
        [
            str(point.streams),
            *(
                with_mark(microseconds(cost.median), cost)
                for cost in (point.engine_offline, point.engine_http, point.beyond, point.client)
            ),
        ]
        for point in findings.points
    ]


def with_mark(text: str, distribution: Distribution) -> str:
    return f"{text} {distribution.mark}" if distribution.mark else text


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def verdict(
    measured: Distribution, goal: float, words: str, *, noise: float | None, is_least: bool = False
) -> str:
    """Whether `goal`, the most (or with `is_least` the least) it may be, is reached.

    Nothing is claimed where the goal lies in the median's interval, or is nearer than the noise.
    """
    if noise is None or measured.interval is None:
        return f"too few repetitions to hold it to the goal of {words}"
    if goal in measured.interval or abs(measured.median / goal - 1) <= noise:
        return f"too near to the goal of {words} to be told from it here"
    reached = (measured.median > goal) == is_least
    return f"which {'reaches' if reached else 'misses'} the goal of {words}"


def noise_of(run: Run) -> float | None:
    """The smallest relative difference that may be claimed; None: it is not known."""
    return aa_from_record(run.checks[-1]).smallest_effect


def delivery_sentence(point: LoadPoint) -> str:
    """How soon a token is on the wire. Bounds of buckets are counts: no A/A noise is in them."""
    if point.delivery_p99 is None or point.worst_p99 is None:
        median_ms = milliseconds(point.delivery_p50.median)
        return f"Half of the tokens are on the wire within {median_ms} ms of their birth. "
    p99 = point.delivery_p99.median
    words = f"{milliseconds(GOAL_DELIVERY_S)} ms"
    goal = verdict(point.delivery_p99, GOAL_DELIVERY_S, words, noise=0.0)
    return (
        f"With {point.streams} streams 99 % of the tokens are on the wire within "
        f"{milliseconds(p99)} ms of their birth, {goal} (in the worst repetition within "
        f"{milliseconds(point.worst_p99)} ms). "
    )


def share_sentence(point: LoadPoint, noise: float | None) -> str:
    """What is left of the throughput. The share is a median of ratios inside rounds, which the two
    medians beside it need not have."""
    goal = verdict(point.share, GOAL_SHARE, f"{GOAL_SHARE:.0%}", noise=noise, is_least=True)
    return (
        f"{point.streams} streams through HTTP get {point.http_tokens_per_s:,.0f} tokens/s, the "
        f"same engine offline gives {point.offline_tokens_per_s:,.0f} (medians over all rounds). "
        f"Paired inside a round the former is {point.share.median:.1%} of the latter, in the "
        f"median (95 %: {share_interval(point.share)}; predicted from processor time: "
        f"{point.predicted_share:.1%}), {goal}. "
    )


def cost_sentence(point: LoadPoint, noise: float | None) -> str:
    """What a streamed token costs, and whom."""
    whose = "" if point.threads == 1 else " on its event loop"
    added = point.engine_http.median - point.engine_offline.median
    words = f"{microseconds(GOAL_BEYOND_S)} µs"
    goal = verdict(point.beyond, GOAL_BEYOND_S, words, noise=noise)
    return (
        f"Beyond the engine's thread a streamed token costs the server "
        f"{microseconds(point.beyond.median)} µs of processor time{whose} (requests of "
        f"{point.output} tokens, everything about them included), {goal}; the engine's "
        f"thread needs {added * 1e6:+,.0f} µs a token against offline. "
    )


def endurance_sentence(endurance: Endurance) -> str:
    """What many requests and many leavers left behind."""
    growth, settled = endurance.growth_bytes, endurance.settled_bytes
    if growth is None or settled is None:
        memory = f"{endurance.num_short:,} short requests were all answered"
    else:
        memory = (
            f"Over {endurance.num_short:,} requests its memory went from {format_bytes(settled)} "
            f"(after {endurance.num_settling}) to {format_bytes(settled + growth)}, which "
            f"{'is' if endurance.is_flat else 'is not'} flat"
        )
    gone = (
        "no request and no block behind"
        if endurance.left_nothing
        else "something behind: "
        + ", ".join(f"{name} {value:g}" for name, value in endurance.gauges.items() if value)
    )
    return (
        f"{memory}; {endurance.num_leaving} clients, of whom {endurance.num_left} went before the "
        f"end, left {gone}. "
    )


def serving_paragraph(findings: ServingFindings) -> str:
    """What HTTP costs here."""
    point, noise = findings.main, noise_of(findings.run)
    return (
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}: "
        f"{share_sentence(point, noise)}"
        f"{delivery_sentence(findings.lightest)}{cost_sentence(point, noise)}"
        f"{endurance_sentence(findings.endurance)}{noise_sentence(findings.run)}"
    )


def serving_numbers(findings: ServingFindings) -> dict[str, str]:
    """What prose may quote."""
    point, lightest = findings.main, findings.lightest
    numbers = {
        "share": f"{point.share.median:.0%}",
        "streams": str(point.streams),
        "tokens_per_s": f"{point.http_tokens_per_s:,.0f}",
        "beyond_us": microseconds(point.beyond.median),
    }
    if lightest.delivery_p99 is not None:
        numbers["delivery_ms"] = milliseconds(lightest.delivery_p99.median)
        numbers["delivery_streams"] = str(lightest.streams)
    return numbers
