"""Plots of staggered arrivals: what load does to each arm, and one burst from close by.

As in `plots`: each `..._plot` turns findings into plain values, each `draw_...` turns those values
into a figure and knows nothing else. Static arms are orange and yellow, continuous ones blue; what
chunked prefill does is the darker blue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoserve.bench.batching_plots import draw_bars
from nanoserve.bench.findings import machine_name
from nanoserve.bench.findings.arrivals import (
    CHUNKED,
    GOOD_SHARE,
    STATIC,
    TIMEOUT,
    WAITING_ARMS,
    WHOLE,
    ArmFindings,
    ArrivalsFindings,
    CellFindings,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.metrics import RequestTimes, median
from nanoserve.bench.plots import FAINT, INK, QUIET, PlotData, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {STATIC: "#D55E00", TIMEOUT: "#E69F00", WHOLE: "#56B4E9", CHUNKED: "#0072B2"}
MARKERS = {STATIC: "s", TIMEOUT: "D", WHOLE: "^", CHUNKED: "o"}

BURST_SHARE = 3
"""A burst is the third of a schedule's requests that came the closest together."""


# --- by load --------------------------------------------------------------------------------------


def arrivals_plot(findings: ArrivalsFindings) -> PlotData:
    """Goodput and median TTFT of every arm by load, and two distributions at one load."""
    cell = findings.main
    return {
        "picture": "arrivals",
        "model": findings.run.header["model"],
        "subject": f"{subject(findings.run)} · {machine_name(findings.run)}\n"
        f"Poisson, {findings.swept[0].schedule.transform}",
        "loads": [swept.load for swept in findings.swept],
        "saturation": rounded(findings.saturation["conv"]),
        "slo_ms": {
            "ttft": rounded(findings.objectives.max_ttft_s * 1e3),
            "tpot": rounded(findings.objectives.max_tpot_s * 1e3),
        },
        "arms": {arm: plotted_arm(findings.swept, arm) for arm in WAITING_ARMS},
        "shown_load": cell.load,
        "shown_requests": cell.num_requests,
        "distributions": {
            arm: {
                "ttft_ms": sorted(rounded(value * 1e3) for value in cell.arms[arm].ttfts),
                "tpot_ms": sorted(rounded(value * 1e3) for value in cell.arms[arm].tpots),
            }
            for arm in WAITING_ARMS
        },
    }


def plotted_arm(cells: Sequence[CellFindings], arm: str) -> PlotData:
    """One arm over all loads."""
    found = [cell.arms[arm] for cell in cells]
    return {
        "good_share": [rounded(each.goodput.share) for each in found],
        "ttft_ms": [rounded(median(each.ttfts) * 1e3) for each in found],
        "predicted_ttft_ms": [predicted_ms(each) for each in found],
    }


def predicted_ms(arm: ArmFindings) -> float | None:
    value = arm.predicted.get("ttft p50")
    return None if value is None else rounded(value * 1e3)


def draw_arrivals(data: PlotData) -> Figure:
    """Above: by load. Below: the distributions behind one of those loads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 7.8), layout="constrained")
    (goodput, ttft), (first, gaps) = figure.subplots(2, 2)
    draw_goodput(goodput, data)
    draw_ttft(ttft, data)
    draw_distribution(first, data, "ttft", "time to first token")
    draw_distribution(gaps, data, "tpot", "time per token after the first")
    figure.suptitle(arrivals_headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def arrivals_headline(data: PlotData) -> str:
    """The message, in one line."""
    place = data["loads"].index(data["shown_load"])
    static, chunked = (data["arms"][arm]["good_share"][place] for arm in (STATIC, CHUNKED))
    return (
        f"{data['model']} at {data['shown_load']:.0%} load: {chunked:.0%} of requests meet their "
        f"objectives, under static batching {static:.0%}"
    )


def draw_goodput(axes: Axes, data: PlotData) -> None:
    """Share of all requests offered that met both objectives."""
    loads = data["loads"]
    for arm, values in data["arms"].items():
        shares = [100 * share for share in values["good_share"]]
        axes.plot(loads, shares, color=COLOURS[arm], marker=MARKERS[arm], lw=2, ms=5.5, label=arm)
    axes.axhline(100 * GOOD_SHARE, color=INK, linewidth=0.8, dashes=(2, 2))
    axes.set_ylim(-4, 104)
    axes.legend(loc="best", frameon=False, fontsize=9)
    slo = data["slo_ms"]
    axes.set_title(
        f"% of requests with TTFT <= {slo['ttft']:,.0f} ms and TPOT <= {slo['tpot']:,.0f} ms",
        loc="left",
        fontsize=11,
    )
    set_load_axis(axes, data)


def draw_ttft(axes: Axes, data: PlotData) -> None:
    """Median TTFT, logarithmic, with the predictions dashed."""
    for arm, values in data["arms"].items():
        colour = COLOURS[arm]
        predicted = [float("nan") if v is None else v for v in values["predicted_ttft_ms"]]
        axes.plot(data["loads"], predicted, color=colour, lw=1.1, dashes=(4, 3))
        axes.plot(data["loads"], values["ttft_ms"], color=colour, marker=MARKERS[arm], lw=2, ms=5.5)
    axes.set_yscale("log")
    set_plain_log_ticks(axes, "y")
    axes.set_title("median time to first token, ms (dashed: simulated)", loc="left", fontsize=11)
    set_load_axis(axes, data)


def set_load_axis(axes: Axes, data: PlotData) -> None:
    loads = data["loads"]
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel(f"load: share of the {data['saturation']:,.3g} requests/s that saturate it")
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)


def set_plain_log_ticks(axes: Axes, side: str) -> None:
    """1, 2, 5, 10 ... in plain numbers."""
    from matplotlib.ticker import LogLocator

    axis = axes.yaxis if side == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,.4g}")
    axes.minorticks_off()


def draw_distribution(axes: Axes, data: PlotData, name: str, words: str) -> None:
    """Cumulative shares; the objective is a dashed line."""
    for arm, values in data["distributions"].items():
        times = values[f"{name}_ms"]
        shares = [100 * (place + 1) / len(times) for place in range(len(times))]
        axes.step(times, shares, where="post", color=COLOURS[arm], linewidth=2)
    axes.axvline(data["slo_ms"][name], color=INK, linewidth=0.8, dashes=(2, 2))
    axes.annotate(
        "objective",
        (data["slo_ms"][name], 2),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=QUIET,
    )
    axes.set_xscale("log")
    set_plain_log_ticks(axes, "x")
    axes.set_ylim(0, 102)
    axes.set_xlabel(f"{words}, ms")
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_title(
        f"% of {data['shown_requests']} requests within, at load {data['shown_load']:g}",
        loc="left",
        fontsize=11,
    )


# --- one burst ------------------------------------------------------------------------------------


def burst_plot(findings: ArrivalsFindings) -> PlotData:
    """The densest third of the most irregular schedule: who waits, and who holds which slot."""
    cell = findings.burst
    first, last = burst_window(cell)
    return {
        "picture": "arrivals_burst",
        "model": findings.run.header["model"],
        "subject": f"{subject(findings.run)} · {machine_name(findings.run)}\n"
        f"{cell.name}, {cell.schedule.transform}",
        "slots": findings.slots,
        "window_s": [rounded(first), rounded(last)],
        "ttft_ms": {arm: rounded(burst_ttft_s(cell, arm) * 1e3) for arm in WAITING_ARMS},
        "arrivals_s": [rounded(a.at_s) for a in cell.schedule.arrivals],
        "queues": {arm: queue_steps(cell.arms[arm].requests) for arm in WAITING_ARMS},
        "timelines": {
            arm: plotted_bars(cell.arms[arm].requests, is_static=arm == STATIC)
            for arm in (STATIC, CHUNKED)
        },
    }


def burst_window(cell: CellFindings) -> tuple[float, float]:
    """From the first arrival of the densest third until the last arm is done with it."""
    members = burst_members(cell)
    ends = [arm.requests[n].token_s[-1] for arm in cell.arms.values() for n in members]
    return cell.schedule.arrivals[members[0]].at_s, max(ends)


def burst_members(cell: CellFindings) -> range:
    """The third of the requests that came the closest together."""
    times = [arrival.at_s for arrival in cell.schedule.arrivals]
    count = max(2, len(times) // BURST_SHARE)
    begin = min(range(len(times) - count + 1), key=lambda i: times[i + count - 1] - times[i])
    return range(begin, begin + count)


def burst_ttft_s(cell: CellFindings, arm: str) -> float:
    """Of the burst's members, the median."""
    ttfts = cell.arms[arm].ttfts
    return median([ttfts[number] for number in burst_members(cell)])


def queue_steps(requests: Sequence[RequestTimes]) -> list[list[float]]:
    """[seconds, requests that wait from then on], one for each change."""
    changes = [(request.arrival_s, 1) for request in requests]
    changes += [(request.first_scheduled_s, -1) for request in requests]
    waiting, steps = 0, []
    for at_s, change in sorted(changes):
        waiting += change
        steps.append([rounded(at_s), float(waiting)])
    return steps


def plotted_bars(requests: Sequence[RequestTimes], *, is_static: bool) -> list[list[float]]:
    """[slot, start, end, freed] of each request, in the lowest slot that was free.

    Static batches follow one another, so a batch's slots are freed when the next could begin: at
    the last end among those that began before.
    """
    order = sorted(requests, key=lambda request: (request.first_scheduled_s, request.arrival_s))
    freed = freed_times(order) if is_static else [request.token_s[-1] for request in order]
    held_until: list[float] = []
    bars = []
    for request, freed_s in zip(order, freed, strict=True):
        start = request.first_scheduled_s
        free = [slot for slot, until in enumerate(held_until) if until <= start]
        slot = free[0] if free else len(held_until)
        held_until[slot : slot + 1] = [freed_s]
        bars.append([float(slot), *map(rounded, (start, request.token_s[-1], freed_s))])
    return bars


def freed_times(order: Sequence[RequestTimes]) -> list[float]:
    """When the batch of each request drained; `order` is that in which they began."""
    batches: list[list[RequestTimes]] = []
    end_s = float("-inf")
    for request in order:
        if request.first_scheduled_s >= end_s:
            batches.append([])
        batches[-1].append(request)
        end_s = max(member.token_s[-1] for member in batches[-1])
    drained = [(max(member.token_s[-1] for member in batch), len(batch)) for batch in batches]
    return [end for end, count in drained for _ in range(count)]


def draw_burst(data: PlotData) -> Figure:
    """Above who waits, below who is served, on one time axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 7.4), layout="constrained")
    queue, upper, lower = figure.subplots(3, 1, sharex=True, height_ratios=(1.15, 1, 1))
    draw_queues(queue, data)
    draw_slots(upper, STATIC, data, "a batch keeps its slots until it is drained (hatched)")
    draw_slots(lower, CHUNKED, data, "a slot is filled again as soon as it is free")
    first, last = data["window_s"]
    pad = 0.03 * (last - first)
    lower.set_xlim(first - pad, last + pad)
    lower.set_xlabel("seconds since the schedule began")
    figure.suptitle(burst_headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def longest_queue(data: PlotData, arm: str) -> int:
    """The most that waited at once while the burst lasted."""
    first, last = data["window_s"]
    return int(max((n for at_s, n in data["queues"][arm] if first <= at_s <= last), default=0))


def burst_headline(data: PlotData) -> str:
    static, chunked = (data["ttft_ms"][arm] for arm in (STATIC, CHUNKED))
    return (
        f"{data['model']}, one burst: first tokens take {static:,.0f} ms under static batching, "
        f"{chunked:,.0f} ms under continuous"
    )


def draw_queues(axes: Axes, data: PlotData) -> None:
    """Requests that have come and have not begun; ticks below are arrivals.

    Lines grow thinner from arm to arm, so that none is hidden where several go together.
    """
    for place, (arm, steps) in enumerate(data["queues"].items()):
        times, counts = zip(*steps, strict=True)
        width = 4.5 - place
        axes.step(times, counts, where="post", color=COLOURS[arm], linewidth=width, label=arm)
    low = -0.08 * max(longest_queue(data, arm) for arm in data["queues"])
    axes.plot(
        data["arrivals_s"], [low] * len(data["arrivals_s"]), "|", color=INK, markersize=7, mew=1
    )
    axes.set_ylabel("waiting")
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    axes.set_title("requests that wait (ticks: arrivals)", loc="left", fontsize=11)


def draw_slots(axes: Axes, arm: str, data: PlotData, words: str) -> None:
    """One row a slot, one bar a request."""
    draw_bars(axes, data["timelines"][arm], COLOURS[arm])
    axes.set_yticks([0, data["slots"] - 1], ["1", str(data["slots"])])
    axes.set_ylabel("slot")
    axes.set_ylim(data["slots"] - 0.5, -0.5)  # the first on top
    axes.set_title(f"{arm}: {words}", loc="left", fontsize=11, color=COLOURS[arm])
