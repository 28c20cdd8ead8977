"""Plots of recorded results: data first, then a drawing of exactly that data.

`kvcache_plot` turns findings into plain values (kept as JSON beside the picture, and what CI
compares, since pixels differ between versions of matplotlib); `draw` turns those values into a
figure and knows nothing else. Colours are Okabe and Ito's, told apart by every kind of eyesight;
curves carry their names, so there is no legend to look up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.bench.findings import machine_name, milliseconds
from nanoserve.bench.findings.kvcache import Comparison, KVCacheFindings, subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PlotData = dict[str, Any]

NAIVE, CACHED = "#D55E00", "#0072B2"
INK, QUIET, FAINT = "#222222", "#555555", "#BBBBBB"
STYLE: Any = {  # the type of matplotlib's keys differs between its versions
    "svg.hashsalt": "nanoserve",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
ON_GRID: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Behind words that stand on grid lines."""

SIGNIFICANT_DIGITS = 6


def kvcache_plot(findings: KVCacheFindings) -> PlotData:
    """What the kvcache picture shows, in plain values."""
    return {
        "title": f"{findings.run.header['model']}, one token at a time",
        "subject": f"{subject(findings.run)} · {machine_name(findings.run)}",
        "wins_from": findings.wins_from,
        "single": [plotted(c) for c in findings.single],
        "batched": [plotted(c) for c in findings.comparisons if c.batch > 1],
    }


def plotted(comparison: Comparison) -> PlotData:
    """One context and batch; times in milliseconds per step, with quartiles and prediction."""
    values: PlotData = {"context": comparison.context, "batch": comparison.batch}
    for name, measured, predicted in (
        ("naive", comparison.naive, comparison.naive_predicted),
        ("cached", comparison.cached, comparison.cached_predicted),
    ):
        values[name] = {
            "ms": rounded(measured.median * 1e3),
            "q1_ms": rounded(measured.q1 * 1e3),
            "q3_ms": rounded(measured.q3 * 1e3),
            "predicted_ms": rounded(predicted.step_s * 1e3),
        }
    values["speedup"] = rounded(comparison.speedup.median)
    values["kv_mib"] = rounded(comparison.kv_bytes / 2**20)
    return values


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def plot_json(data: PlotData) -> str:
    """The data as it is kept beside its picture."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def save(data: PlotData, stem: Path, draw: Callable[[PlotData], Figure]) -> list[Path]:
    """Write `stem`.svg and `stem`.png. The SVG carries no date and no random ids."""
    import matplotlib as mpl

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.parent / f"{stem.name}.{ending}" for ending in ("svg", "png")]
    with mpl.rc_context(STYLE):
        figure = draw(data)
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def draw_kvcache(data: PlotData) -> Figure:
    """Time per step against context, and what the cache gains there; batches below if measured."""
    from matplotlib.figure import Figure

    heights = (3.4, 1.3) if data["batched"] else (1.0,)
    figure = Figure(figsize=(10.6, 6.9 if data["batched"] else 4.9), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    draw_step_times(figure.add_subplot(grid[0, 0]), data["single"])
    draw_speedups(figure.add_subplot(grid[0, 1]), data)
    if data["batched"]:
        draw_batches(figure.add_subplot(grid[1, :]), data["single"] + data["batched"])
    figure.suptitle(headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def headline(data: PlotData) -> str:
    """The message, in one line."""
    last = data["single"][-1]
    return (
        f"{data['title']}: at context {last['context']:,} the cache makes it "
        f"{short_times(last['speedup'])} faster, for {mebibytes(last['kv_mib'])} MiB"
    )


def draw_step_times(axes: Axes, points: Sequence[PlotData]) -> None:
    """Both arms with quartile bands and dashed predictions, on logarithmic axes."""
    contexts = [point["context"] for point in points]
    for arm, colour in (("naive", NAIVE), ("cached", CACHED)):
        values = {key: [point[arm][key] for point in points] for key in points[0][arm]}
        axes.fill_between(
            contexts, values["q1_ms"], values["q3_ms"], color=colour, alpha=0.25, linewidth=0
        )
        axes.plot(contexts, values["ms"], color=colour, linewidth=2.2, marker="o", markersize=4.5)
        axes.plot(contexts, values["predicted_ms"], color=colour, linewidth=1.1, dashes=(4, 3))
        axes.annotate(
            f"{milliseconds(values['ms'][-1] / 1e3)} ms",
            (contexts[-1], values["ms"][-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
        )
    label_curves(axes, points)
    set_log_axes(axes, contexts)
    axes.set_title("ms per step, one sequence", loc="left", fontsize=11)


def label_curves(axes: Axes, points: Sequence[PlotData]) -> None:
    """Each curve's name beside its end: left of the rising one, above the flat one."""
    last = points[-1]
    axes.annotate(
        "recompute everything",
        (last["context"], last["naive"]["ms"]),
        xytext=(-34, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=NAIVE,
        fontweight="bold",
        bbox=ON_GRID,
    )
    axes.annotate(
        "KV cache",
        (last["context"], max(last["cached"]["ms"], last["cached"]["predicted_ms"])),
        xytext=(-10, 8),
        textcoords="offset points",
        ha="right",
        va="bottom",
        bbox=ON_GRID,
        color=CACHED,
        fontweight="bold",
    )
    axes.text(
        0.03,
        0.97,
        "dashed: predicted from measured ceilings",
        transform=axes.transAxes,
        fontsize=8.5,
        color=QUIET,
        va="top",
        bbox=ON_GRID,
    )


def set_log_axes(axes: Axes, contexts: Sequence[int]) -> None:
    """A tick a context, named if a power of two or the last; room for the curves' names."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(contexts[0] * 0.85, contexts[-1] * 3.4)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.6, high * 1.6)
    named = {n for n in contexts if n & (n - 1) == 0} | {contexts[-1]}
    axes.set_xticks(contexts, [f"{n:,}" if n in named else "" for n in contexts], fontsize=8.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("context (tokens)")
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)


def draw_speedups(axes: Axes, data: PlotData) -> None:
    """How many times faster a step is; grey where the cache does not win for sure."""
    points, wins_from = data["single"], data["wins_from"]
    places = range(len(points))
    won = [wins_from is not None and point["context"] >= wins_from for point in points]
    bars = axes.bar(
        places,
        [point["speedup"] for point in points],
        color=[CACHED if win else FAINT for win in won],
        width=0.72,
    )
    axes.bar_label(bars, [short_times(p["speedup"]) for p in points], padding=2, fontsize=9)
    axes.axhline(1.0, color=INK, linewidth=0.8, dashes=(2, 2))
    below = [f"{p['context']:,}\n{mebibytes(p['kv_mib'])}" for p in points]
    axes.set_xticks(places, below, fontsize=9)
    axes.set_xlabel("context (tokens), and MiB of KV cache that it holds")
    axes.set_title("times faster with the cache (grey: no certain gain)", loc="left", fontsize=11)
    axes.margins(y=0.12)


def mebibytes(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def short_times(ratio: float) -> str:
    """With a digit more where one would round a loss to none."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 1.1 else f"{ratio:.2f}x"


def draw_batches(axes: Axes, points: Sequence[PlotData]) -> None:
    """Speed-up by batch and context; empty where it was not measured."""
    from matplotlib.colors import LogNorm

    contexts = sorted({point["context"] for point in points})
    batches = sorted({point["batch"] for point in points})
    known = {(point["batch"], point["context"]): point["speedup"] for point in points}
    table = [[known.get((b, n), float("nan")) for n in contexts] for b in batches]
    largest = max(known.values())
    norm = LogNorm(vmin=1.0, vmax=max(largest, 2.0))
    axes.imshow(table, cmap="Blues", norm=norm, aspect="auto")
    for row, batch in enumerate(batches):
        for column, context in enumerate(contexts):
            if (batch, context) in known:
                ratio = known[batch, context]
                dark = norm(max(ratio, 1.0)) > 0.6
                axes.text(
                    column,
                    row,
                    short_times(ratio),
                    ha="center",
                    va="center",
                    color="white" if dark else INK,
                    fontsize=9,
                )
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_ylabel("batch")
    axes.set_xlabel("context (tokens)")
    axes.set_title("times faster with the cache, by batch", loc="left", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
