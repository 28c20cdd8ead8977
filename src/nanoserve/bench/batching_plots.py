"""Plots of what batching gains: how a step grows with its batch, who holds a slot, which policy.

As in `plots`: each `..._plot` turns findings into plain values, each `draw_...` turns those values
into a figure and knows nothing else. Static is orange, continuous blue; hatched is computed or held
for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoserve.bench.findings import machine_name, milliseconds, times
from nanoserve.bench.findings.batch import KNEE, BatchCurve, BatchFindings
from nanoserve.bench.findings.batching import (
    CONTINUOUS,
    STATIC,
    Bar,
    BatchingFindings,
    CaseFindings,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.plots import CACHED, FAINT, INK, NAIVE, ON_GRID, QUIET, PlotData, rounded
from nanoserve.bench.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {STATIC: NAIVE, CONTINUOUS: CACHED}
SHADES = (0.95, 0.6)
"""Neighbours in a slot differ, so that one can see where a request ends and the next begins."""


def provenance(run: Run) -> str:
    return f"{subject(run)} · {machine_name(run)}"


# --- how a step grows with the batch --------------------------------------------------------------


def batch_scaling_plot(findings: BatchFindings) -> PlotData:
    """Step times and throughput by batch, a curve per context."""
    return {
        "picture": "batch_scaling",
        "model": findings.run.header["model"],
        "subject": provenance(findings.run),
        "knee_ratio": KNEE,
        "curves": [plotted_curve(curve) for curve in findings.curves],
    }


def plotted_curve(curve: BatchCurve) -> PlotData:
    return {
        "context": curve.context,
        "gain": rounded(curve.gain),
        "slowdown": rounded(curve.points[-1].slowdown.median),
        "knee": None if curve.knee is None else rounded(curve.knee),
        "predicted_knee": None if curve.predicted_knee is None else rounded(curve.predicted_knee),
        "points": [
            {
                "batch": point.batch,
                "ms": rounded(point.step.median * 1e3),
                "q1_ms": rounded(point.step.q1 * 1e3),
                "q3_ms": rounded(point.step.q3 * 1e3),
                "predicted_ms": rounded(point.predicted_s * 1e3),
                "tokens_per_s": rounded(point.tokens_per_s),
                "tokens_per_s_each": rounded(point.tokens_per_s_each),
            }
            for point in curve.points
        ],
    }


def draw_batch_scaling(data: PlotData) -> Figure:
    """Left: the step, its floor and the knee. Right: tokens per second, of all and of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = data["curves"][0]
    draw_steps(left, data)
    draw_throughput(right, first)
    figure.suptitle(scaling_headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def scaling_headline(data: PlotData) -> str:
    """The message, in one line."""
    curve = data["curves"][0]
    return (
        f"{data['model']}: {curve['points'][-1]['batch']} sequences at once write "
        f"{curve['gain']:.1f}x the tokens per second, each {curve['slowdown']:.1f}x slower"
    )


def draw_steps(axes: Axes, data: PlotData) -> None:
    """ms per step against batch, with quartiles and predictions; the first context in colour."""
    for place, curve in reversed(list(enumerate(data["curves"]))):
        points = curve["points"]
        batches = [p["batch"] for p in points]
        colour = CACHED if place == 0 else QUIET
        axes.fill_between(
            batches,
            [p["q1_ms"] for p in points],
            [p["q3_ms"] for p in points],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
        axes.plot(batches, [p["ms"] for p in points], color=colour, marker="o", markersize=4.5)
        axes.plot(batches, [p["predicted_ms"] for p in points], color=colour, lw=1.1, dashes=(4, 3))
        axes.annotate(
            f"{milliseconds(points[-1]['ms'] / 1e3)} ms\ncontext {curve['context']:,}",
            (batches[-1], points[-1]["ms"]),
            xytext=(7, 10 if place else -10),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            bbox=ON_GRID,
        )
    draw_knee(axes, data)
    set_batch_axes(axes, [p["batch"] for p in data["curves"][0]["points"]], room=2.6)
    axes.set_title("ms per decode step (dashed: predicted)", loc="left", fontsize=11)


def draw_knee(axes: Axes, data: PlotData) -> None:
    """The floor of one sequence, and where a step has become `knee_ratio` times that."""
    curve = data["curves"][0]
    floor = curve["points"][0]["ms"]
    axes.axhline(floor, color=FAINT, linewidth=1)
    axes.axhline(floor * data["knee_ratio"], color=INK, linewidth=0.8, dashes=(2, 2))
    knee = curve["knee"]
    words = f"{data['knee_ratio']:g}x as long"
    if knee is not None:
        axes.plot([knee], [floor * data["knee_ratio"]], marker="D", color=INK, markersize=7)
        words += f" at batch {knee:.1f}"
    axes.annotate(
        words,
        (1.0 if knee is None else knee, floor * data["knee_ratio"]),
        xytext=(9, -14),
        textcoords="offset points",
        fontsize=9.5,
        fontweight="bold",
        bbox=ON_GRID,
    )
    last = curve["points"][-1]["batch"]
    axes.annotate(
        f"one sequence: {milliseconds(floor / 1e3)} ms",
        (last * 2.4, floor),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color=QUIET,
        bbox=ON_GRID,
    )


def set_batch_axes(axes: Axes, batches: Sequence[int], *, room: float) -> None:
    """Powers of two below, plain numbers at the side, `room` times the last batch to the right."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(batches[0] * 0.9, batches[-1] * room)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("sequences in the batch")
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)


def draw_throughput(axes: Axes, curve: PlotData) -> None:
    """Tokens per second of all sequences together, and of each."""
    points = curve["points"]
    batches = [p["batch"] for p in points]
    for key, colour, words in (
        ("tokens_per_s", CACHED, "all together"),
        ("tokens_per_s_each", NAIVE, "each"),
    ):
        values = [p[key] for p in points]
        axes.plot(batches, values, color=colour, linewidth=2.2, marker="o", markersize=4.5)
        axes.annotate(
            f"{values[-1]:,.3g}\n{words}",
            (batches[-1], values[-1]),
            xytext=(7, 7),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            bbox=ON_GRID,
        )
    set_batch_axes(axes, batches, room=2.6)
    axes.set_title(f"tokens per second, context {curve['context']:,}", loc="left", fontsize=11)


# --- who holds which slot -------------------------------------------------------------------------


def timeline_plot(findings: BatchingFindings) -> PlotData:
    """Every request in its slot, as the first counted run of each policy went, in seconds."""
    main = findings.main
    return {
        "picture": "batching_timeline",
        "model": findings.run.header["model"],
        "subject": f"{provenance(findings.run)}\n{main.transform}",
        "slots": main.slots,
        "num_requests": main.num_requests,
        "gain": None if main.measured is None else rounded(main.measured.gain.median),
        "policies": {policy: plotted_bars(bars) for policy, bars in findings.bars.items()},
    }


def plotted_bars(bars: Sequence[Bar]) -> PlotData:
    """[slot, start, end, freed] of each, and the share of held slot time that computed nothing."""
    held_s = sum(bar.freed_s - bar.start_s for bar in bars)
    return {
        "bars": [
            [bar.slot, rounded(bar.start_s), rounded(bar.end_s), rounded(bar.freed_s)]
            for bar in bars
        ],
        "makespan_s": rounded(max(bar.end_s for bar in bars)),
        "idle_share": rounded(sum(bar.freed_s - bar.end_s for bar in bars) / held_s),
    }


def draw_timeline(data: PlotData) -> Figure:
    """Static above, continuous below, on one time axis; hatched: finished, but the slot is kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw_slots(upper, STATIC, data)
    draw_slots(lower, CONTINUOUS, data)
    longest = max(policy["makespan_s"] for policy in data["policies"].values())
    lower.set_xlim(0, longest * 1.09)
    lower.set_xlabel("seconds since all requests arrived")
    gain = "" if data["gain"] is None else f": static takes {times(data['gain'])} as long"
    figure.suptitle(
        f"{data['model']}, the same {data['num_requests']} requests over {data['slots']} "
        f"slots{gain}",
        fontsize=13,
        fontweight="bold",
        x=0.012,
        ha="left",
    )
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def draw_bars(axes: Axes, bars: Sequence[tuple[int, float, float, float]], colour: str) -> None:
    """A bar a request, from its start to its end, in two shades in turn; hatched from there until
    its slot was free.
    """
    seen: dict[int, int] = {}
    for slot, start, end, freed in bars:
        number = seen[slot] = seen.get(slot, -1) + 1
        shade = SHADES[number % 2]
        axes.barh(slot, end - start, left=start, height=0.82, color=colour, alpha=shade)
        if freed > end:
            axes.barh(
                slot,
                freed - end,
                left=end,
                height=0.82,
                facecolor="white",
                edgecolor="#999999",
                hatch="////",
                linewidth=0,
            )


def draw_slots(axes: Axes, policy: str, data: PlotData) -> None:
    """One row a slot, one bar a request."""
    values, colour = data["policies"][policy], COLOURS[policy]
    draw_bars(axes, values["bars"], colour)
    makespan = values["makespan_s"]
    axes.axvline(makespan, color=INK, linewidth=1)
    axes.annotate(
        f"{makespan:,.1f} s",
        (makespan, (data["slots"] - 1) / 2),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
    )
    axes.set_yticks([0, data["slots"] - 1], ["1", str(data["slots"])])
    axes.set_ylabel("slot")
    axes.invert_yaxis()
    words = {
        STATIC: "a batch keeps its slots until the last of it is done "
        f"(hatched: {values['idle_share']:.0%} of the slots' time computes for nobody)",
        CONTINUOUS: "a slot is filled again as soon as it is free",
    }
    axes.set_title(f"{policy}: {words[policy]}", loc="left", fontsize=11, color=colour)


# --- static or continuous -------------------------------------------------------------------------


def gains_plot(findings: BatchingFindings) -> PlotData:
    """Gains by workload, and of the main workload by slots: measured and predicted."""
    main = findings.main
    return {
        "picture": "continuous_batching",
        "model": findings.run.header["model"],
        "subject": provenance(findings.run),
        "slots": main.slots,
        "num_requests": main.num_requests,
        "workloads": [plotted_case(c) for c in (main, *findings.others, findings.control)],
        "by_slots": [plotted_case(case) for case in findings.by_slots],
    }


def plotted_case(case: CaseFindings) -> PlotData:
    """One case; "gain" None where it was simulated only."""
    return {
        "workload": case.workload,
        "slots": case.slots,
        "gain": None if case.measured is None else rounded(case.measured.gain.median),
        "predicted_gain": rounded(case.predicted_gain),
        "static_rows": rounded(case.static.waste),
        "continuous_rows": rounded(case.continuous.waste),
    }


def draw_gains(data: PlotData) -> Figure:
    """Left: gain by workload. Right: gain of the main workload by slots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    draw_workloads(left, data)
    draw_by_slots(right, data)
    main = data["workloads"][0]
    gain = main["predicted_gain"] if main["gain"] is None else main["gain"]
    figure.suptitle(
        f"{data['model']}: continuous batching serves {data['num_requests']} requests "
        f"{times(gain)} as fast as static, because their lengths differ",
        fontsize=13,
        fontweight="bold",
        x=0.012,
        ha="left",
    )
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def draw_workloads(axes: Axes, data: PlotData) -> None:
    """A bar a workload; a black tick where it was predicted to end; hollow: simulated only."""
    cases = data["workloads"]
    for place, case in enumerate(cases):
        is_measured = case["gain"] is not None
        value = case["gain"] if is_measured else case["predicted_gain"]
        axes.barh(
            place,
            value,
            height=0.6,
            color=CACHED if is_measured else "white",
            edgecolor=CACHED,
            alpha=0.9,
        )
        axes.plot([case["predicted_gain"]] * 2, [place - 0.38, place + 0.38], color=INK, lw=2)
        words = times(value) + ("" if is_measured else " (simulated)")
        axes.annotate(
            f"{words}\nrows per token {case['static_rows']:.2f} / {case['continuous_rows']:.2f}",
            (max(value, case["predicted_gain"]), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.axvline(1.0, color=INK, linewidth=0.8, dashes=(2, 2))
    axes.set_yticks(range(len(cases)), [case["workload"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.85 * max(max(c["gain"] or 0, c["predicted_gain"]) for c in cases))
    axes.set_xlabel("makespan, static / continuous")
    title = f"over {data['slots']} slots (bar: measured, tick: predicted)"
    axes.set_title(title, loc="left", fontsize=11)


def draw_by_slots(axes: Axes, data: PlotData) -> None:
    """Gain against slots: a point where it was measured, a dashed line through the predictions."""
    cases = data["by_slots"]
    slots = [case["slots"] for case in cases]
    axes.plot(slots, [c["predicted_gain"] for c in cases], color=CACHED, lw=1.2, dashes=(4, 3))
    measured = [case for case in cases if case["gain"] is not None]
    axes.plot(
        [case["slots"] for case in measured],
        [case["gain"] for case in measured],
        color=CACHED,
        linewidth=2.2,
        marker="o",
        markersize=6,
    )
    for case in measured:
        axes.annotate(
            times(case["gain"]),
            (case["slots"], case["gain"]),
            xytext=(0, 9 if case["gain"] >= case["predicted_gain"] else -16),
            textcoords="offset points",
            ha="center",
            color=CACHED,
            fontweight="bold",
        )
    axes.axhline(1.0, color=INK, linewidth=0.8, dashes=(2, 2))
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(n) for n in slots])
    axes.set_xlim(slots[0] / 1.25, slots[-1] * 1.25)
    axes.minorticks_off()
    axes.set_ylim(0.9, 1.12 * max(max(c["gain"] or 0, c["predicted_gain"]) for c in cases))
    axes.set_xlabel(f"slots; {cases[0]['workload']}")
    axes.set_title("by slots (dot: measured, dashed: simulated)", loc="left", fontsize=11)
