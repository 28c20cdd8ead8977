"""The picture of `peers`: who is faster, at a glance, and by how much, in every cell.

A field a cell and engine: blue where ours is faster, orange where the other one is, the paler the
closer they are, with the multiple of our time written in it. As in `plots`: data first, then a
drawing of exactly that data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanoserve.bench.findings import machine_name, milliseconds, times
from nanoserve.bench.findings.peers import (
    OURS,
    PeerFindings,
    Timing,
    entrants_of,
    ratio_of,
)
from nanoserve.bench.plots import CACHED, FAINT, INK, NAIVE, QUIET, PlotData, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FULL_COLOUR = 3.0
"""At this many times our time (or a part of it) a field has its full colour."""


def peers_plot(findings: PeerFindings) -> PlotData:
    """A row an engine and precision, ours first in each; null where a cell was not measured."""
    run = findings.run
    threads = run.header["setup"]["engine"]["threads"]
    duels = findings.duels
    return {
        "picture": "peers",
        "model": run.header["model"],
        "subject": (
            f"{run.header['model']} ({run.header['weights']} weights), {threads} threads · "
            f"{machine_name(run)}"
        ),
        "cells": list(findings.cells),
        "comparisons": len(duels),
        "ahead": sum(verdict == "ahead" for _, verdict in duels),
        "rows": [
            {
                "family": entrant["family"],
                "name": entrant["name"],
                "cells": [
                    plotted(findings.timing(entrant["name"], entrant["family"], cell))
                    for cell in findings.cells
                ],
            }
            for entrant in entrants_of(findings)
            if any(findings.timing(entrant["name"], entrant["family"], c) for c in findings.cells)
        ],
    }


def plotted(timing: Timing | None) -> PlotData | None:
    """Milliseconds, and the multiple of ours."""
    if timing is None:
        return None
    ratio = None if timing.name == OURS else rounded(ratio_of(timing).median)
    return {"ms": rounded(timing.step.median * 1e3), "ratio": ratio}


def draw_peers(data: PlotData) -> Figure:
    """The fields, precisions apart from one another."""
    from matplotlib.figure import Figure

    rows, cells = data["rows"], data["cells"]
    places = row_places(data)
    height = 1.9 + 0.36 * (places[-1] + 1 if places else 1)
    figure = Figure(figsize=(3.4 + 1.35 * max(3, len(cells)), height), layout="constrained")
    axes = figure.subplots()
    for place, row in zip(places, rows, strict=True):
        for column, cell in enumerate(row["cells"]):
            draw_field(axes, column, place, cell)
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.set_ylim((places[-1] if places else 0) + 0.5, -0.5)
    axes.set_xticks(range(len(cells)), [cell.replace(", ", "\n") for cell in cells])
    axes.xaxis.tick_top()
    axes.set_yticks(places, [f"{row['name']}" for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["name"] == OURS else "normal")
    name_families(axes, data, places)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.suptitle(headline(data), fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(
        "blue: ours is faster, orange: the other; times as long as ours in the same round\n"
        + data["subject"],
        fontsize=8,
        color=QUIET,
        x=0.012,
        ha="left",
    )
    return figure


def row_places(data: PlotData) -> list[float]:
    """Where each row stands: a little apart where another precision begins."""
    places: list[float] = []
    for index, row in enumerate(data["rows"]):
        is_first = index == 0 or data["rows"][index - 1]["family"] != row["family"]
        before = places[-1] + 1 if places else 0.0
        places.append(before + (0.7 if is_first else 0.0))
    return places


def name_families(axes: Axes, data: PlotData, places: list[float]) -> None:
    """The precision, above its first row."""
    named: set[str] = set()
    for place, row in zip(places, data["rows"], strict=True):
        if row["family"] not in named:
            named.add(row["family"])
            axes.text(
                -0.5, place - 0.62, row["family"], ha="left", va="bottom", fontsize=9, color=QUIET
            )


def draw_field(axes: Axes, column: float, place: float, cell: PlotData | None) -> None:
    """Colour by the ratio, and what it is in figures; ours shows its milliseconds."""
    if cell is None:
        axes.text(column, place, "-", ha="center", va="center", color=FAINT)
        return
    ratio = cell["ratio"]
    strength = 0.0 if ratio is None else min(1.0, abs(math.log(ratio)) / math.log(FULL_COLOUR))
    colour = "#E8E8E8" if ratio is None else CACHED if ratio > 1 else NAIVE
    axes.barh(
        place,
        0.94,
        height=0.88,
        left=column - 0.47,
        color=colour,
        alpha=1.0 if ratio is None else 0.12 + 0.83 * strength,
        linewidth=0,
    )
    ms = milliseconds(cell["ms"] / 1e3)
    text = f"{ms} ms" if ratio is None else f"{times(ratio)}  {ms}"
    axes.text(
        column,
        place,
        text,
        ha="center",
        va="center",
        fontsize=9,
        color="white" if strength > 0.55 else INK,
        fontweight="bold" if ratio is None else "normal",
    )


def headline(data: PlotData) -> str:
    """The message, in one line."""
    return (
        f"{data['model']}: nanoserve is ahead of the fastest rival in {data['ahead']} of "
        f"{data['comparisons']} comparisons"
    )
