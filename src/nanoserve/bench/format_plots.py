"""Plots of what a step costs in each executor and number format, and how far each is from limits.

As in `plots`: each `..._plot` turns findings into plain values, each `draw_...` turns those values
into a figure and knows nothing else. Names stand beside what they name, pushed apart where they
would overlap; colours are Okabe and Ito's, and no message hangs on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.bench.batching_plots import provenance
from nanoserve.bench.findings import milliseconds, times
from nanoserve.bench.findings.graphs import GraphsCell, GraphsFindings
from nanoserve.bench.findings.int8 import INT8, READ_BACK, AttentionCell, Int8Findings
from nanoserve.bench.findings.roofline import RooflineFindings, RooflinePoint
from nanoserve.bench.plots import CACHED, FAINT, INK, NAIVE, QUIET, PlotData, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, PURPLE, SKY, AMBER = "#009E73", "#AA4499", "#56B4E9", "#B8860B"
FORMAT_COLOURS = {
    "float32": CACHED,
    "bfloat16": NAIVE,
    "float16": AMBER,
    "int8-weight-only": SKY,
    "int8": GREEN,
    "int4": PURPLE,
}
OTHER_COLOURS = (CACHED, GREEN, PURPLE)
SAME_ROOF = 1.08
"""Rates nearer than this cannot be told apart in the picture."""

MARKERS = ("o", "s", "D", "^", "v", "P")


def spread(values: Sequence[float], gap: float) -> list[float]:
    """`values` in their order, moved apart so that no two are nearer than `gap`; as little as
    that takes, each crowd around where its middle was.
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    crowds: list[list[int]] = []
    centres: list[float] = []
    for place in order:
        crowds.append([place])
        centres.append(values[place])
        while len(crowds) > 1 and too_near(crowds[-2:], centres[-2:], gap):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
            centres[-2:] = [sum(values[i] for i in crowds[-1]) / len(crowds[-1])]
    found = [0.0] * len(values)
    for crowd, centre in zip(crowds, centres, strict=True):
        for number, place in enumerate(crowd):
            found[place] = centre + (number - (len(crowd) - 1) / 2) * gap
    return found


def too_near(crowds: Sequence[Sequence[int]], centres: Sequence[float], gap: float) -> bool:
    """Whether two crowds, each `gap` from member to member, would touch."""
    half_widths = sum(len(crowd) for crowd in crowds) / 2
    return centres[1] - centres[0] < half_widths * gap


def add_headline(figure: Figure, headline: str, subject: str) -> None:
    """The message above, where it comes from below."""
    figure.suptitle(headline, fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(subject, fontsize=8, color=QUIET, x=0.012, ha="left")


def number_axis(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.4g}")


# --- how much of decode is dispatch ---------------------------------------------------------------


def graphs_plot(findings: GraphsFindings) -> PlotData:
    """Every shape: the eager step, the dispatch predicted in it, and the other executors' steps."""
    return {
        "picture": "graphs",
        "model": findings.run.header["model"],
        "subject": provenance(findings.run),
        "contexts": sorted({cell.context for cell in findings.cells}),
        "cells": [plotted_cell(cell) for cell in findings.cells],
    }


def plotted_cell(cell: GraphsCell) -> PlotData:
    return {
        "batch": cell.batch,
        "context": cell.context,
        "eager_ms": rounded(cell.eager.median * 1e3),
        "dispatch_ms": rounded(cell.dispatch_s * 1e3),
        "others": [
            {
                "name": arm.name,
                "ms": rounded(arm.step.median * 1e3),
                "of_eager": rounded(1 / arm.speedup.median),
            }
            for arm in cell.others
        ],
    }


def draw_graphs(data: PlotData) -> Figure:
    """A panel a context: each executor's step as a share of eager's, predicted dispatch hatched."""
    from matplotlib.figure import Figure

    contexts = data["contexts"]
    figure = Figure(figsize=(10.6, 4.9), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=True):
        draw_shares(axes, [cell for cell in data["cells"] if cell["context"] == context])
        axes.set_title(f"context {context:,}", loc="left", fontsize=11)
    panels[0].set_ylabel("share of the eager step")
    first = data["cells"][0]
    best = first["others"][-1]
    add_headline(
        figure,
        f"{data['model']}: {best['name']} takes {best['of_eager']:.0%} of the eager step of one "
        "sequence"
        if first["batch"] == 1
        else f"{data['model']}: {best['name']} takes {best['of_eager']:.0%} of the eager step",
        data["subject"],
    )
    return figure


def draw_shares(axes: Axes, cells: Sequence[PlotData]) -> None:
    """Bars in groups of one batch: eager first, then the others."""
    width = 0.8 / (1 + len(cells[0]["others"]))
    start = -0.4 + width / 2
    for place, cell in enumerate(cells):
        draw_bar(axes, place + start, 1.0, cell["eager_ms"], width, NAIVE)
        dispatch = cell["dispatch_ms"] / cell["eager_ms"]
        axes.bar(
            place + start,
            min(dispatch, 1.0),
            width * 0.94,
            facecolor="none",
            edgecolor="white",
            hatch="////",
            linewidth=0,
        )
        for number, arm in enumerate(cell["others"]):
            x = place + start + width * (number + 1)
            draw_bar(axes, x, arm["of_eager"], arm["ms"], width, OTHER_COLOURS[number])
    draw_executor_key(axes, [arm["name"] for arm in cells[0]["others"]])
    axes.set_xticks(range(len(cells)), [f"batch {cell['batch']}" for cell in cells])
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 1.36)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)


def draw_bar(
    axes: Axes, x: float, height: float, step_ms: float, width: float, colour: str
) -> None:
    """A bar with its milliseconds above."""
    axes.bar(x, height, width * 0.94, color=colour)
    axes.annotate(
        f"{milliseconds(step_ms / 1e3)}\nms",
        (x, height),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=colour,
        fontweight="bold",
        linespacing=0.9,
    )


def draw_executor_key(axes: Axes, others: Sequence[str]) -> None:
    """What each bar of a group is, in its colour, from left to right."""
    names = [("eager (hatched: dispatch, predicted)", NAIVE)]
    names += [(name, OTHER_COLOURS[number]) for number, name in enumerate(others)]
    for line, (name, colour) in enumerate(names):
        axes.text(
            0.02,
            0.985 - 0.055 * line,
            name,
            transform=axes.transAxes,
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            va="top",
        )


# --- how far from the limit -----------------------------------------------------------------------


def roofline_plot(findings: RooflineFindings) -> PlotData:
    """Intensity and rate of every format and batch; the read rate and the matmul rates as roofs.

    Points whose cache is int8 lie next to those of the same weights and are left to the table.
    """
    shown = [point for point in findings.points if "KV" not in point.name]
    return {
        "picture": "roofline",
        "model": findings.run.header["model"],
        "subject": provenance(findings.run),
        "read_gb_per_s": rounded(findings.read_bytes_per_s / 1e9),
        "matmul_gflops": {
            dtype: rounded(rate / 1e9)
            for dtype, rate in findings.matmul_flops_per_s.items()
            if dtype in {point.weights for point in shown}
        },
        "batches": findings.batches,
        "points": [plotted_point(point) for point in shown],
    }


def plotted_point(point: RooflinePoint) -> PlotData:
    return {
        "format": point.name,
        "batch": point.batch,
        "intensity": rounded(point.intensity),
        "gflops": rounded(point.flops_per_s / 1e9),
        "bandwidth_share": rounded(point.bandwidth_share),
        "ms": rounded(point.step.median * 1e3),
    }


def draw_roofline(data: PlotData) -> Figure:
    """Left: the classic picture. Right: the share of the bandwidth, by format and batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1))
    draw_roofs(left, data)
    draw_format_curves(left, data)
    draw_bandwidth_shares(right, data)
    single = [point for point in data["points"] if point["batch"] == data["batches"][0]]
    low, high = (f(point["bandwidth_share"] for point in single) for f in (min, max))
    sequences = "one sequence" if data["batches"][0] == 1 else f"{data['batches'][0]} sequences"
    reached = (
        f"{low:.0%} to {high:.0%} of the memory's bandwidth"
        if high <= 1
        else f"{low / high:.0%} to 100% of the fastest rate seen"
    )
    headline = f"{data['model']}: a step of {sequences} reads its bytes at {reached}"
    add_headline(figure, headline, data["subject"])
    return figure


def draw_roofs(axes: Axes, data: PlotData) -> None:
    """The slanted roof of reading, and a flat one for each matmul rate."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [point["intensity"] for point in data["points"]]
    rates = [point["gflops"] for point in data["points"]]
    low, high = min(intensities) / 2, max(intensities) * 1.15
    read, roofs = data["read_gb_per_s"], data["matmul_gflops"]
    top = max([*roofs.values(), *rates])
    axes.set_xlim(low, high)
    axes.set_ylim(min([*rates, low * read]) / 1.6, top * 2.2)
    corner = min(high, top / read)
    axes.plot([low, corner], [low * read, corner * read], color=INK, linewidth=1.6)
    axes.text(
        0.02,
        0.985,
        f"slanted roof: reading at {read:,.1f} GB/s; flat ones: matmul",
        transform=axes.transAxes,
        va="top",
        fontsize=9,
        color=INK,
    )
    named = name_roofs(roofs)
    heights = spread([math.log(rate) for _, rate in named], 0.26)
    for (dtype, rate), height in zip(named, heights, strict=True):
        axes.plot([min(high, rate / read), high], [rate, rate], color=INK, lw=1.2, dashes=(5, 3))
        axes.text(
            low * 1.08,
            math.exp(height) * 1.03,
            f"{dtype}: {rate:,.0f}",
            va="bottom",
            fontsize=9,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )
        axes.plot([low, rate / read], [rate, rate], color=FAINT, lw=0.8, zorder=0)
    number_axis(axes.xaxis)
    number_axis(axes.yaxis)
    axes.set_xlabel("operations per byte that must move")
    axes.set_title("GFLOP/s of a decode step", loc="left", fontsize=11)


def name_roofs(roofs: Mapping[str, float]) -> list[tuple[str, float]]:
    """Names and rates from the lowest; rates that lie on top of one another share a roof."""
    named: list[tuple[str, float]] = []
    for dtype, rate in sorted(roofs.items(), key=lambda item: item[1]):
        if named and rate < named[-1][1] * SAME_ROOF:
            named[-1] = (f"{named[-1][0]}, {dtype}", rate)
        else:
            named.append((dtype, rate))
    return named


def draw_format_curves(axes: Axes, data: PlotData) -> None:
    """A curve a format through its batches, its name at the end, batches beside the points."""
    names = list(dict.fromkeys(point["format"] for point in data["points"]))
    curves = [[p for p in data["points"] if p["format"] == name] for name in names]
    ends = spread([math.log(curve[-1]["gflops"]) for curve in curves], 0.3)
    for number, (name, curve) in enumerate(zip(names, curves, strict=True)):
        colour = FORMAT_COLOURS.get(name, INK)
        axes.plot(
            [p["intensity"] for p in curve],
            [p["gflops"] for p in curve],
            color=colour,
            linewidth=1.4,
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
        )
        last = curve[-1]
        axes.annotate(
            f"{name}, batch {last['batch']}",
            (last["intensity"], last["gflops"]),
            xytext=(max(p["intensity"] for p in data["points"]) * 1.3, math.exp(ends[number])),
            textcoords="data",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkB": 4},
        )
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.55)


def draw_bandwidth_shares(axes: Axes, data: PlotData) -> None:
    """Bars of the share reached by each format, a row a format and a bar a batch."""
    names = list(dict.fromkeys(point["format"] for point in data["points"]))
    known = {(p["format"], p["batch"]): p for p in data["points"]}
    batches = data["batches"]
    height = 0.82 / len(batches)
    for row, name in enumerate(names):
        for number, batch in enumerate(batches):
            point = known[name, batch]
            y = row - 0.41 + height * (number + 0.5)
            axes.barh(
                y,
                point["bandwidth_share"],
                height * 0.92,
                color=FORMAT_COLOURS.get(name, INK),
                alpha=1.0 - 0.3 * number,
            )
            axes.annotate(
                f"{point['bandwidth_share']:.0%} · batch {batch} · "
                f"{milliseconds(point['ms'] / 1e3)} ms",
                (max(1.0, point["bandwidth_share"]), y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
    axes.axvline(1.0, color=INK, linewidth=0.8, dashes=(2, 2))
    axes.set_yticks(range(len(names)), [name.replace("-weight", "\nweight") for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.9)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title("share of the bandwidth", loc="left", fontsize=11)


# --- attention over int8 --------------------------------------------------------------------------


def int8_plot(findings: Int8Findings) -> PlotData:
    """Attention by cache at the largest batch, and int8 against float32 at every shape."""
    batch = findings.largest.batch
    return {
        "picture": "int8_attention",
        "model": findings.run.header["model"],
        "subject": provenance(findings.run),
        "batch": batch,
        "curves": [plotted_attention(cell) for cell in findings.cells if cell.batch == batch],
        "ratios": [plotted_ratio(cell) for cell in findings.cells],
    }


def plotted_attention(cell: AttentionCell) -> PlotData:
    values = {name: rounded(found.median * 1e3) for name, found in cell.attention.items()}
    return {"context": cell.context, "ms": values}


def plotted_ratio(cell: AttentionCell) -> PlotData:
    back = cell.reading_back
    return {
        "batch": cell.batch,
        "context": cell.context,
        "direct": rounded(cell.int8_ratio.median),
        "read_back": None if back is None else rounded(back.median),
        "step": rounded(cell.step_against_float32[INT8].median),
    }


ATTENTION_COLOURS = {
    "float32": CACHED,
    "bfloat16": NAIVE,
    "float16": AMBER,
    INT8: GREEN,
    READ_BACK: PURPLE,
    "float32, PyTorch": QUIET,
}


def draw_int8(data: PlotData) -> Figure:
    """Left: milliseconds by context. Right: int8 over float32, directly and read back."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    draw_attention_curves(left, data)
    draw_ratios(right, data["ratios"])
    last = data["ratios"][-1]
    back = "" if last["read_back"] is None else f", read back {times(last['read_back'])}"
    add_headline(
        figure,
        f"{data['model']}, batch {last['batch']}, context {last['context']:,}: attention directly "
        f"on int8 takes {times(last['direct'])} of float32's time{back}",
        data["subject"],
    )
    return figure


def draw_attention_curves(axes: Axes, data: PlotData) -> None:
    """A curve a cache, named at its end."""
    curves = data["curves"]
    contexts = [cell["context"] for cell in curves]
    names = list(curves[-1]["ms"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = spread([math.log(curves[-1]["ms"][name]) for name in names], 0.26)
    for number, name in enumerate(names):
        values = [cell["ms"][name] for cell in curves]
        is_library = name not in ("float32", "bfloat16", "float16", INT8)
        style: dict[str, Any] = {"dashes": (4, 2)} if is_library else {}
        colour = ATTENTION_COLOURS.get(name, INK)
        axes.plot(contexts, values, color=colour, marker=MARKERS[number], markersize=5, **style)
        axes.annotate(
            f"{milliseconds(values[-1] / 1e3)} ms  {name}",
            (contexts[-1], values[-1]),
            xytext=(contexts[-1] * 1.25, math.exp(ends[number])),
            textcoords="data",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkB": 4},
        )
    axes.set_xlim(contexts[0] * 0.85, contexts[-1] * 1.25 * (contexts[-1] / contexts[0]) ** 0.75)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_locator(no_ticks())
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 1.3)
    number_axis(axes.yaxis)
    axes.set_xlabel("context (tokens)")
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_title(
        f"ms of attention in a step of {data['batch']} (dashed: PyTorch)", loc="left", fontsize=11
    )


def no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def draw_ratios(axes: Axes, ratios: Sequence[PlotData]) -> None:
    """Two bars a shape: directly, and read back; a line where int8 costs what float32 does."""
    has_back = any(cell["read_back"] is not None for cell in ratios)
    height = 0.4 if has_back else 0.7
    for place, cell in enumerate(ratios):
        shown = [("direct", ATTENTION_COLOURS[INT8])]
        shown += [("read_back", ATTENTION_COLOURS[READ_BACK])] * has_back
        for number, (key, colour) in enumerate(shown):
            y = place + (number - 0.5) * height if has_back else float(place)
            axes.barh(y, cell[key], height * 0.92, color=colour)
            axes.annotate(
                times(cell[key]),
                (cell[key], y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=colour,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
    axes.axvline(1.0, color=INK, linewidth=1, zorder=0)
    largest = max(max(cell["direct"], cell["read_back"] or 0.0) for cell in ratios)
    axes.set_xlim(0, max(1.2, largest) * 1.18)
    names = [f"batch {cell['batch']}, {cell['context']:,}" for cell in ratios]
    axes.set_yticks(range(len(ratios)), names)
    axes.set_xlabel("attention over int8 / over float32 (line: no gain)")
    axes.set_ylim(len(ratios) - 0.4, -1.25)
    words = [("directly", INT8), ("read back first", READ_BACK)][: 1 + has_back]
    for place, (word, name) in enumerate(words):
        axes.text(
            0.02 + 0.22 * place,
            0.985,
            word,
            transform=axes.transAxes,
            va="top",
            color=ATTENTION_COLOURS[name],
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.set_title("int8 over float32, by shape", loc="left", fontsize=11)
