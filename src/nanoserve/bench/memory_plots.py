"""Plot of memory against concurrency: every probe, the model's lines, the limit they run into.

As in `plots`: `ceilings_plot` turns findings into plain values, `draw_ceilings` turns those values
into a figure and knows nothing else. To the left a colour is an arm, to the right a term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve.bench.findings import machine_name
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.findings.memory import OK, ArmFit, Ceiling, MemoryFindings, same_question
from nanoserve.bench.plots import CACHED, FAINT, INK, NAIVE, QUIET, PlotData, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (NAIVE, CACHED, "#009E73", "#CC79A7", "#E69F00")
TERMS = {"runtime": FAINT, "fixed": QUIET, "per sequence": INK, "KV": CACHED}


def ceilings_plot(findings: MemoryFindings) -> PlotData:
    """Every arm at the longest context: its line, its probes under the limit, its terms there."""
    longest = findings.longest
    return {
        "picture": "memory_ceilings",
        "model": findings.run.header["model"],
        "subject": f"{subject(findings.run)} · {machine_name(findings.run)}",
        "limit_mib": rounded(findings.limit_bytes / 2**20),
        "context": longest[0].context,
        "arms": [
            plotted_arm(findings, arm, ceiling)
            for arm, ceiling in zip(findings.arms, longest, strict=True)
        ],
        "ceilings": [plotted_ceiling(ceiling) for ceiling in findings.ceilings],
    }


def plotted_arm(findings: MemoryFindings, arm: ArmFit, ceiling: Ceiling) -> PlotData:
    model, context, batch = arm.fit.model, ceiling.context, ceiling.largest_pass
    labels = {
        "weights_dtype": arm.dtype,
        "cache_dtype": arm.cache_dtype,
        "context": context,
    }
    probes = [probe for probe in findings.probes if same_question(labels, probe)]
    terms = {
        "runtime": model.runtime_bytes,
        "fixed": model.fixed_bytes,
        "per sequence": model.buffer_bytes(batch),
        "KV": model.kv_bytes(batch, context),
    }
    return {
        "name": f"{arm.dtype} weights, {arm.cache_dtype} KV",
        "line": [
            [n, rounded(model.peak_bytes(n, context) / 2**20)]
            for n in (0, ceiling.smallest_failure)
        ],
        "passed": [
            [p["batch"], rounded(p["peak_bytes"] / 2**20)] for p in probes if p["outcome"] == OK
        ],
        "failed": [p["batch"] for p in probes if p["outcome"] != OK],
        "terms_mib": {name: rounded(value / 2**20) for name, value in terms.items()},
    }


def plotted_ceiling(ceiling: Ceiling) -> PlotData:
    return {
        "weights": ceiling.dtype,
        "kv": ceiling.cache_dtype,
        "context": ceiling.context,
        "predicted": ceiling.predicted,
        "bracket": [ceiling.largest_pass, ceiling.smallest_failure],
        "error": rounded(ceiling.error),
        "all_logits": ceiling.if_all_logits,
    }


def draw_ceilings(data: PlotData) -> Figure:
    """Left: bytes against sequences up to the limit. Right: what a full memory is made of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    draw_lines(left, data)
    draw_terms(right, data)
    figure.suptitle(headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(data["subject"], fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def headline(data: PlotData) -> str:
    """The message, in one line."""
    inside = [c["bracket"][0] <= c["predicted"] < c["bracket"][1] for c in data["ceilings"]]
    return (
        f"{data['model']} under {data['limit_mib']:,.0f} MiB: {sum(inside)} of {len(inside)} "
        "ceilings predicted before they were met"
    )


def draw_lines(axes: Axes, data: PlotData) -> None:
    """The model's lines; circles fitted, crosses did not."""
    limit = data["limit_mib"]
    axes.axhline(limit, color=INK, linewidth=1)
    axes.annotate("the limit", (0, limit), xytext=(3, 4), textcoords="offset points", fontsize=9.5)
    for colour, arm in zip(COLOURS, data["arms"], strict=False):
        axes.plot(*zip(*arm["line"], strict=True), color=colour, linewidth=1.4, dashes=(4, 2))
        if arm["passed"]:
            axes.plot(*zip(*arm["passed"], strict=True), "o", color=colour, markersize=6)
        axes.plot(arm["failed"], [limit] * len(arm["failed"]), "x", color=colour, markersize=8)
        axes.annotate(
            arm["name"],
            (arm["line"][-1][0], 0),
            xytext=(0, 5),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            color=colour,
            fontsize=8.5,
        )
    axes.set_ylim(bottom=0, top=limit * 1.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"sequences of {data['context']:,} tokens (o fits, x is out of memory)")
    axes.set_title("MiB at the peak (dashed: predicted)", loc="left", fontsize=11)


def draw_terms(axes: Axes, data: PlotData) -> None:
    """A bar for each arm at its ceiling, term by term."""
    names = [arm["name"].replace(", ", "\n") for arm in data["arms"]]
    left = [0.0] * len(names)
    for term, colour in TERMS.items():
        values = [arm["terms_mib"][term] for arm in data["arms"]]
        axes.barh(names, values, left=left, color=colour, label=term, height=0.62)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.axvline(data["limit_mib"], color=INK, linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8.5, length=0)
    axes.legend(
        ncols=4, fontsize=8.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08)
    )
    axes.set_title("MiB by term, as many sequences as fit", loc="left", fontsize=11)
