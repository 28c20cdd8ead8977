"""The picture of what number formats cost and buy: divergence, speed, and where agreement is lost.

As in `plots`: data first, then a drawing of exactly that data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoserve.bench.batching_plots import provenance
from nanoserve.bench.findings import times
from nanoserve.bench.findings.precision import (
    EAGER,
    EAGER_BATCH,
    REFERENCE,
    FormatSpeed,
    PrecisionFindings,
    windows_text,
)
from nanoserve.bench.format_plots import AMBER, GREEN, MARKERS, PURPLE, SKY, add_headline, spread
from nanoserve.bench.plots import CACHED, FAINT, INK, NAIVE, QUIET, PlotData, rounded
from nanoserve.bench.quality import Quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "float16": AMBER,
    "bfloat16": NAIVE,
    "KV int8": CACHED,
    "int8-weight-only": SKY,
    "int8": GREEN,
    "int4": PURPLE,
}
"""Formats whose agreement is drawn by margin; the others lie on top of one of these."""

SMALLEST = 1e-9
"""Nats: a divergence below is drawn there."""


def precision_plot(findings: PrecisionFindings) -> PlotData:
    """Each format's divergence, perplexity and agreement; its speed where it was timed."""
    formats = findings.formats
    floors = {
        name: rounded(found.divergence)
        for name, found in findings.qualities.items()
        if name in (EAGER, EAGER_BATCH)
    }
    quality = findings.run.header["quality"]
    return {
        "picture": "precision",
        "model": findings.run.header["model"],
        "quality_model": quality["model"],
        "subject": f"{provenance(findings.run)}; quality: {quality['model']}, "
        f"{windows_text(quality['num_windows'], quality['length'])}",
        "floors": floors,
        "formats": [
            {"format": name, **plotted_quality(found), **plotted_speed(findings.speeds.get(name))}
            for name, found in formats.items()
        ],
    }


def plotted_quality(found: Quality) -> PlotData:
    return {
        "divergence": rounded(found.divergence),
        "increase": rounded(found.increase),
        "agreement": rounded(found.agreement),
        "bins": [
            {
                "low": part.low,
                "positions": part.num_positions,
                "agreement": rounded(part.num_agreeing / part.num_positions)
                if part.num_positions
                else None,
            }
            for part in found.bins
        ],
    }


def plotted_speed(speed: FormatSpeed | None) -> PlotData:
    if speed is None:
        return {"speedup": None, "peak": None, "peak_batch": None}
    return {
        "speedup": rounded(speed.single.speedup.median),
        "peak": rounded(speed.peak.speedup.median),
        "peak_batch": speed.peak.batch,
    }


def draw_precision(data: PlotData) -> Figure:
    """Divergence and speed, a row a format; agreement by margin beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 5.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.55, 0.95, 1.15))
    draw_divergences(left, data)
    draw_speeds(middle, data["formats"])
    draw_agreement(right, data["formats"])
    add_headline(figure, precision_headline(data), data["subject"])
    return figure


def precision_headline(data: PlotData) -> str:
    """The message, in one line: the fastest format and what it costs."""
    timed = [form for form in data["formats"] if form["speedup"] is not None]
    if not timed:
        return f"{data['quality_model']}: what number formats cost"
    best = max(timed, key=lambda form: form["speedup"])
    return (
        f"{data['model']}: {best['format']} makes a token {times(best['speedup'])} as fast as "
        f"{REFERENCE}, for {best['increase']:+.2%} of perplexity"
    )


def draw_divergences(axes: Axes, data: PlotData) -> None:
    """KL of every format on a logarithmic axis; the noise floor as a line; words at the side."""
    formats = data["formats"]
    values = [max(form["divergence"], SMALLEST) for form in formats]
    floors = [value for value in data["floors"].values() if value > SMALLEST]
    axes.set_xscale("log")
    low = min([*values, *floors]) / 5
    axes.hlines(range(len(formats)), low, values, color=FAINT, linewidth=1)
    axes.plot(values, range(len(formats)), linestyle="none", marker="o", color=CACHED, ms=7)
    if floors:
        axes.axvline(max(floors), color=INK, linewidth=0.9, dashes=(3, 2))
        axes.text(max(floors) * 1.3, -0.72, "float32 on eager", fontsize=8.5, va="center")
    high = max(values) * 3
    for row, form in enumerate(formats):
        axes.text(
            high,
            row,
            f"{form['increase']:+.2%}   {form['agreement']:.2%}",
            va="center",
            fontsize=9,
        )
    axes.text(high, -0.72, "perplexity, same token", fontsize=8.5, va="center", color=QUIET)
    axes.set_xlim(low, high * (high / low) ** 0.5)
    axes.set_ylim(len(formats) - 0.5, -1.1)
    axes.set_yticks(range(len(formats)), [form["format"] for form in formats])
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(max(values))) + 1)
    axes.set_xticks([10.0**power for power in decades][:: 1 + len(decades) // 6])
    axes.minorticks_off()
    axes.set_xlabel("KL(float32 | format), nats a token")
    axes.set_title("what it costs", loc="left", fontsize=11)


def draw_speeds(axes: Axes, formats: Sequence[PlotData]) -> None:
    """Step of float32 over the format's: one sequence, and at the format's best batch."""
    for row, form in enumerate(formats):
        if form["speedup"] is None:
            axes.text(1.08, row, "not timed", va="center", fontsize=8.5, color=QUIET)
            continue
        for offset, key, colour, words in (
            (-0.2, "speedup", CACHED, ""),
            (0.2, "peak", NAIVE, f" ({form['peak_batch']})"),
        ):
            axes.barh(row + offset, form[key], 0.36, color=colour)
            axes.annotate(
                f"{times(form[key])}{words}",
                (form[key], row + offset),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=colour,
                fontweight="bold",
            )
    axes.vlines(1.0, -0.45, len(formats) - 0.5, color=INK, linewidth=0.8, ls=":", zorder=0)
    largest = max((max(f["speedup"] or 0, f["peak"] or 0) for f in formats), default=1.0)
    axes.set_xlim(0, 1.35 * max(1.0, largest))
    axes.set_ylim(len(formats) - 0.5, -1.1)
    axes.set_yticks([])
    axes.text(0.02, -0.87, "one sequence", color=CACHED, fontsize=9, fontweight="bold")
    axes.text(0.02, -0.55, "at its best (batch)", color=NAIVE, fontsize=9, fontweight="bold")
    axes.set_xlabel("times as fast as float32")
    axes.set_title("what it buys", loc="left", fontsize=11)


def draw_agreement(axes: Axes, formats: Sequence[PlotData]) -> None:
    """Share of equal next tokens by float32's top-two margin, a curve a format."""
    shown = [form for form in formats if form["format"] in CURVES]
    if not shown:
        axes.set_axis_off()
        return
    bins = shown[0]["bins"]
    filled = [place for place, part in enumerate(bins) if part["positions"]]
    lowest = min(form["bins"][place]["agreement"] for form in shown for place in filled)
    span = max(1.0 - lowest, 0.02)
    first = [form["bins"][filled[0]]["agreement"] for form in shown]
    heights = spread(first, span * 0.062)
    for number, form in enumerate(shown):
        colour = CURVES[form["format"]]
        axes.plot(
            filled,
            [form["bins"][place]["agreement"] for place in filled],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
        )
        axes.annotate(
            form["format"],
            (filled[0], first[number]),
            xytext=(filled[0] - 0.45, heights[number]),
            textcoords="data",
            ha="right",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkB": 3},
        )
    axes.set_xlim(filled[0] - 3.6, filled[-1] + 0.3)
    middle = sum(heights) / len(heights)
    axes.set_ylim(
        min(lowest, middle - span / 2, *heights) - 0.05 * span, max(1.0, *heights) + 0.05 * span
    )
    axes.set_xticks(filled, [f"{bins[place]['low']:g}" for place in filled], fontsize=8.5)
    axes.yaxis.tick_right()
    axes.spines["right"].set_visible(True)
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_yticks([tick for tick in axes.get_yticks() if lowest - 0.1 <= tick <= 1.0001])
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_xlabel("float32's top-two margin, from (nats)")
    axes.set_title("where agreement is lost", loc="left", fontsize=11)
