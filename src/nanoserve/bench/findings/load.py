"""What a load says of a server: latencies from the scheduled arrivals, errors, the sender's lag.

Pure functions of the records: one header, one record a request. A request that failed has no
latency; it counts among those offered, so that a server which refuses does not look fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nanoserve.bench.arrivals import Schedule
from nanoserve.bench.findings import Table, milliseconds
from nanoserve.bench.metrics import (
    Goodput,
    RequestTimes,
    e2e,
    goodput,
    itl,
    min_samples,
    supported_percentile,
    throughput_out,
    tpot,
    ttft,
)
from nanoserve.bench.record import Run

MAX_LAG_SHARE = 0.01
"""A sender that lags by more than this share of the mean gap distorts what it measures."""

SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFindings:
    """One load. `requests` are those that were answered, with a time for each of their tokens.

    `gaps` is None where the server does not tell when each token came. `lags_s` are those of all
    that were sent. `max_ttft_s` and `max_tpot_s` are the objectives, None: none was named.
    """

    run: Run
    schedule: Schedule
    requests: tuple[RequestTimes, ...]
    problems: Counter[str]
    gaps: tuple[float, ...] | None
    lags_s: tuple[float, ...]
    num_prompt_tokens: tuple[int, ...]
    max_ttft_s: float | None
    max_tpot_s: float | None

    @property
    def num_offered(self) -> int:
        return len(self.schedule.arrivals)

    @property
    def num_failed(self) -> int:
        return self.problems.total()

    @property
    def lag_share(self) -> float | None:
        """Mean lag over mean gap; None with nothing sent, or all of it at once."""
        gap_s = fmean(self.schedule.gaps_s) if self.schedule.gaps_s else 0.0
        return fmean(self.lags_s) / gap_s if self.lags_s and gap_s else None

    @property
    def good(self) -> Goodput | None:
        """None where no objective was named."""
        if self.max_ttft_s is None and self.max_tpot_s is None:
            return None
        return goodput(
            self.requests,
            num_offered=self.num_offered,
            max_ttft_s=float("inf") if self.max_ttft_s is None else self.max_ttft_s,
            max_tpot_s=float("inf") if self.max_tpot_s is None else self.max_tpot_s,
        )


def load_findings(run: Run) -> LoadFindings:
    """All conclusions of one recorded load."""
    records = [record for record in run.records if record["kind"] == "request"]
    whole = [record for record in records if not record["problem"]]
    requests = tuple(
        RequestTimes(
            arrival_s=record["due_s"],
            first_scheduled_s=record["sent_s"],
            token_s=tuple(record["token_s"]),
        )
        for record in whole
    )
    header = run.header
    return LoadFindings(
        run=run,
        schedule=Schedule.from_json(header["schedule"]),
        requests=requests,
        problems=Counter(record["problem"] for record in records if record["problem"]),
        gaps=tuple(itl(requests)) if all(record["is_exact"] for record in whole) else None,
        lags_s=tuple(r["sent_s"] - r["due_s"] for r in records if r["sent_s"] is not None),
        num_prompt_tokens=tuple(
            r["num_prompt_tokens"] for r in whole if r["num_prompt_tokens"] is not None
        ),
        max_ttft_s=header["slo"]["ttft_s"],
        max_tpot_s=header["slo"]["tpot_s"],
    )


def load_table(findings: LoadFindings) -> Table:
    """Milliseconds: mean and percentiles of every latency."""
    requests = findings.requests
    rows = [("TTFT", [ttft(request) for request in requests])]
    rows.append(("TPOT", [gap for r in requests if (gap := tpot(r)) is not None]))
    if findings.gaps is not None:
        rows.append(("ITL", list(findings.gaps)))
    rows.append(("E2E", [e2e(request) for request in requests]))
    heads = ["ms", "n", "mean", *(f"p{100 * share:g}" for share in SHARES)]
    return heads, [[name, str(len(values)), *spread(values)] for name, values in rows]


def spread(values: Sequence[float]) -> list[str]:
    """Mean and percentiles, dashes where there are too few."""
    if not values:
        return ["-"] * (1 + len(SHARES))
    found = [supported_percentile(values, share) for share in SHARES]
    return [
        milliseconds(fmean(values)),
        *("-" if value is None else milliseconds(value) for value in found),
    ]


def load_paragraph(findings: LoadFindings) -> str:
    """What was offered, what came of it, and whether the sender kept time."""
    schedule = findings.schedule
    how = schedule.process if schedule.cv is None else f"{schedule.process}, CV {schedule.cv:g}"
    return (
        f"{findings.num_offered} requests at {schedule.rate:.4g} a second ({how}; "
        f"{schedule.transform}): {answered_text(findings)} {prompt_text(findings)}"
        f"{goodput_text(findings)}{gaps_text(findings)}{lag_text(findings)} Percentiles need "
        f"{', '.join(f'{min_samples(share)} (p{100 * share:g})' for share in SHARES[1:])} requests."
    )


def answered_text(findings: LoadFindings) -> str:
    """How many, how fast, and what went wrong with the others."""
    answered = len(findings.requests)
    if not answered:
        text = "none was answered."
    else:
        text = (
            f"{answered} were answered, {throughput_out(findings.requests):,.1f} output tokens a "
            f"second by the server's own count."
        )
    if findings.num_failed:
        reasons = ", ".join(f"{n} x {problem}" for problem, n in findings.problems.most_common())
        text += f" {findings.num_failed} failed: {reasons}."
    return text


def prompt_text(findings: LoadFindings) -> str:
    """How long the prompts were to the server: words and tokens differ."""
    counts = findings.num_prompt_tokens
    if not counts:
        return ""
    asked = fmean(length.prompt for length in findings.schedule.lengths)
    return f"Prompts of {asked:.0f} words were {fmean(counts):.0f} tokens to it. "


def goodput_text(findings: LoadFindings) -> str:
    good = findings.good
    if good is None:
        return ""
    wanted = [
        f"{name} <= {milliseconds(value)} ms"
        for name, value in (("TTFT", findings.max_ttft_s), ("TPOT", findings.max_tpot_s))
        if value is not None
    ]
    return (
        f"{good.share:.1%} of all offered met {' and '.join(wanted)}: {good.requests_per_s:.2f} a "
        "second. "
    )


def gaps_text(findings: LoadFindings) -> str:
    if findings.gaps is not None:
        return ""
    return "When each token came is not known (events and tokens differ), so there is no ITL. "


def lag_text(findings: LoadFindings) -> str:
    """Whether the sender kept time."""
    share = findings.lag_share
    if not findings.lags_s:
        return "Nothing was sent."
    mean_s, worst_s = fmean(findings.lags_s), max(findings.lags_s)
    text = f"Sent {mean_s * 1e6:,.0f} us late on average, {worst_s * 1e6:,.0f} at most"
    if share is None:
        return f"{text}."
    if share > MAX_LAG_SHARE:
        return (
            f"{text}. WARNING: that is {share:.1%} of the mean gap, more than "
            f"{MAX_LAG_SHARE:.0%}: this machine is too slow or too busy to send at that rate."
        )
    return f"{text}, {share:.2%} of the mean gap."
