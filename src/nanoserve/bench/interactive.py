"""Pictures to zoom: a drawn figure as plain values that plotly.js takes, one panel for each axes.

What is drawn for paper is read back: lines, bars, bands, points, fields of colour, words and axes.
So every chapter's picture is interactive without a second drawing of it, and shows what the PNG
shows. An artist of another kind is left out, and the log says so.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.bench.findings import Table

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

Json = dict[str, Any]
PX_PER_IN, PX_PER_POINT = 96, 4 / 3
PANEL_WIDTH_IN = 5.5
MIN_HEIGHT_PX, MAX_HEIGHT_PX = 260, 520
NUM_COLOURS = 11
"""Points at which a colour map is sampled."""

SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down"}
ANCHORS = {"center": "middle", "center_baseline": "middle", "baseline": "bottom"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One axes: `traces` and `layout` for plotly.js, and the same values as a table.

    Panels with the same `linked` number share their horizontal axis.
    """

    title: str
    traces: list[Json]
    layout: Json
    table: Table
    height_px: int
    linked: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactive:
    """A picture: its message in one line, what ran, and its panels from left to right."""

    headline: str
    subject: str
    panels: list[Panel]


def interactive(figure: Figure) -> Interactive:
    """Everything of a figure that was drawn and not yet saved."""
    shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    return Interactive(
        headline=figure.get_suptitle(),
        subject=figure.get_supxlabel(),
        panels=[make_panel(axes, shown) for axes in shown],
    )


def make_panel(axes: Axes, among: Sequence[Axes]) -> Panel:
    siblings = [other for other in axes.get_shared_x_axes().get_siblings(axes) if other in among]
    traces = [*image_traces(axes), *collection_traces(axes), *bar_traces(axes), *line_traces(axes)]
    title = axes.get_title(loc="left") or axes.get_title()
    height_in = axes.bbox.height / axes.bbox.width * PANEL_WIDTH_IN
    horizontal, vertical = axis_layout(axes.xaxis), axis_layout(axes.yaxis)
    layout = {
        "xaxis": horizontal,
        "yaxis": vertical,
        "shapes": [*line_shapes(axes), *span_shapes(axes)],
        "annotations": text_annotations(axes),
        "barmode": "overlay",
        "showlegend": axes.get_legend() is not None,
    }
    return Panel(
        title=title,
        traces=traces,
        layout=layout,
        table=panel_table(traces, horizontal, vertical),
        height_px=int(min(MAX_HEIGHT_PX, max(MIN_HEIGHT_PX, height_in * PX_PER_IN))),
        linked=min(among.index(other) for other in siblings) if len(siblings) > 1 else None,
    )


# --- values ---------------------------------------------------------------------------------------


def plain(values: Iterable[Any]) -> list[float | None]:
    """Numbers of Python with six digits; None for what is none."""
    return [None if v is None or not math.isfinite(v) else float(f"{float(v):.6g}") for v in values]


def colour(value: Any, alpha: float | None = None) -> str:
    """`#rrggbb`, or `rgba(…)` where something shines through."""
    from matplotlib.colors import to_hex, to_rgba

    red, green, blue, opacity = to_rgba(value)
    opacity *= 1.0 if alpha is None else alpha
    if opacity >= 1.0:
        return to_hex((red, green, blue))
    numbers = ",".join(str(round(part * 255)) for part in (red, green, blue))
    return f"rgba({numbers},{opacity:.3g})"


POWER = re.compile(r"\$\\mathdefault\{(\d+)\^\{(-?\d+)\}\}\$")
"""How matplotlib writes the ticks of a logarithmic axis."""


def words(text: str) -> str:
    """Text for plotly.js, which takes some of HTML in it, and powers of ten in no other way."""
    plain = text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>")
    return POWER.sub(r"\1<sup>\2</sup>", plain)


def left_out(artist: Artist) -> list[Json]:
    logger.warning("not drawn on the page: %s", type(artist).__name__)
    return []


def follows_data(artist: Artist) -> tuple[bool, bool]:
    """Whether x and y of this artist are values of the axes; else they are shares of its box."""
    return branches(artist.get_transform(), artist.axes)


def branches(transform: Any, axes: Any) -> tuple[bool, bool]:
    x, y = transform.contains_branch_seperately(axes.transData)
    return bool(x), bool(y)


# --- axes -----------------------------------------------------------------------------------------


def axis_layout(axis: Axis) -> Json:
    """Scale, range, title, and ticks where those were set by hand."""
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import FixedLocator, NullFormatter

    is_log = axis.get_scale() == "log"
    limits = axis.get_view_interval()
    made: Json = {
        "type": "log" if is_log else "linear",
        "range": plain(math.log10(limit) if is_log else limit for limit in limits),
        "title": {"text": words(axis.get_label_text())},
    }
    if axis.get_inverted() and limits[0] < limits[1]:
        made["range"].reverse()
    formatter = axis.get_major_formatter()
    if isinstance(formatter, NullFormatter) or not len(axis.get_majorticklocs()):
        made["showticklabels"] = False
    elif isinstance(axis.get_major_locator(), FixedLocator | StrCategoryLocator):
        places = axis.get_majorticklocs()
        made["tickvals"] = plain(places)
        made["showgrid"] = False  # such ticks name things rather than measure them
        made["ticktext"] = [words(text) for text in formatter.format_ticks(list(places))]
    elif is_log:
        made["dtick"] = "D2"
    return made


# --- lines ----------------------------------------------------------------------------------------


def line_traces(axes: Axes) -> list[Json]:
    """Every line through data; the words of its colour are its name where it has none."""
    return [line_trace(axes, line) for line in axes.get_lines() if all(follows_data(line))]


def line_trace(axes: Axes, line: Line2D) -> Json:
    xs: Any = line.get_xdata(orig=False)
    ys: Any = line.get_ydata(orig=False)
    marker, style = str(line.get_marker()), line.get_linestyle()
    parts = ["lines"] * (style not in ("None", "", " "))
    parts += ["markers"] * (marker not in ("None", "", " "))
    shade = colour(line.get_color())
    return {
        "type": "scatter",
        "mode": "+".join(parts) or "lines",
        "name": name_of(axes, line),
        "x": plain(xs),
        "y": plain(ys),
        "opacity": 1.0 if line.get_alpha() is None else line.get_alpha(),
        "line": {
            "color": shade,
            "width": line.get_linewidth() * PX_PER_POINT,
            "dash": "dash" if line.is_dashed() else "solid",
            "shape": {"steps-post": "hv", "steps-pre": "vh", "steps-mid": "hvh"}.get(
                line.get_drawstyle(), "linear"
            ),
        },
        "marker": {
            "color": colour(line.get_markerfacecolor())
            if line.get_markerfacecolor() != "none"
            else "rgba(0,0,0,0)",
            "size": line.get_markersize() * PX_PER_POINT,
            "symbol": SYMBOLS.get(marker, "circle"),
            "line": {"color": shade, "width": 1},
        },
    }


def name_of(axes: Axes, line: Line2D) -> str:
    """A line's label; else the words that stand in its colour, and whether it is the dashed one."""
    label = str(line.get_label())
    if label and not label.startswith("_"):
        return label
    shade = colour(line.get_color())
    said = [t.get_text() for t in axes.texts if colour(t.get_color()) == shade and t.get_text()]
    near = next((text for text in said if any(c.isalpha() for c in text)), "").replace("\n", " ")
    return f"{near} (dashed)".strip() if line.is_dashed() else near


def line_shapes(axes: Axes) -> list[Json]:
    """Lines across the whole axes."""
    return [
        {
            "type": "line",
            "layer": "below",
            **ends(line.get_xdata(orig=False), line.get_ydata(orig=False), follows_data(line)),
            "line": {
                "color": colour(line.get_color()),
                "width": line.get_linewidth() * PX_PER_POINT,
                "dash": "dash" if line.is_dashed() else "solid",
            },
        }
        for line in axes.get_lines()
        if not all(follows_data(line))
    ]


def ends(xs: Any, ys: Any, follows: tuple[bool, bool]) -> Json:
    (x0, x1), (y0, y1) = plain((xs[0], xs[-1])), plain((ys[0], ys[-1]))
    return {"x0": x0, "x1": x1, "y0": y0, "y1": y1, **references(follows)}


def references(follows: tuple[bool, bool]) -> Json:
    return {
        "xref": "x" if follows[0] else "x domain",
        "yref": "y" if follows[1] else "y domain",
    }


# --- bars and other areas -------------------------------------------------------------------------


def bar_traces(axes: Axes) -> list[Json]:
    """Bars that look alike in one trace, whoever drew them."""
    from matplotlib.container import BarContainer

    found: dict[tuple[Any, ...], Json] = {}
    for container in axes.containers:
        if not isinstance(container, BarContainer):
            continue
        label = str(container.get_label())
        name = "" if label.startswith("_") else label
        for bar in container.patches:
            key = (container.orientation, name, look(bar))
            trace = found.setdefault(key, empty_bars(container.orientation, name, bar))
            add_bar(trace, bar, axes)
    return list(found.values())


def look(patch: Patch) -> tuple[str, str, str]:
    return colour(patch.get_facecolor()), colour(patch.get_edgecolor()), patch.get_hatch() or ""


def empty_bars(orientation: str | None, name: str, bar: Patch) -> Json:
    face, edge, hatch = look(bar)
    marker: Json = {"color": face, "line": {"color": edge, "width": bar.get_linewidth()}}
    if hatch:
        marker["pattern"] = {"shape": "/", "fgcolor": edge, "bgcolor": face, "size": 6}
    is_flat = orientation == "horizontal"
    return {
        "type": "bar",
        "orientation": "h" if is_flat else "v",
        "name": name,
        "x": [],
        "y": [],
        "base": [],
        "width": [],
        "marker": marker,
    }


def add_bar(trace: Json, bar: Any, axes: Axes) -> None:
    (x, y), width, height = bar.get_xy(), bar.get_width(), bar.get_height()
    if trace["orientation"] == "h":
        middle, length, base, breadth = y + height / 2, width, x, height
        scale, (floor, _) = axes.get_xscale(), axes.get_xlim()
    else:
        middle, length, base, breadth = x + width / 2, height, y, width
        scale, (floor, _) = axes.get_yscale(), axes.get_ylim()
    if scale == "log" and base <= 0:
        base = floor  # plotly.js knows no bar from nothing on such an axis
        length -= base
    along, across = ("x", "y") if trace["orientation"] == "h" else ("y", "x")
    for key, value in ((along, length), (across, middle), ("base", base), ("width", breadth)):
        trace[key] += plain([value])


def span_shapes(axes: Axes) -> list[Json]:
    """Rectangles that are no bars: `axvspan` and its like."""
    from matplotlib.patches import Rectangle

    bars = {patch for container in axes.containers for patch in getattr(container, "patches", ())}
    shapes: list[Json] = []
    for patch in axes.patches:
        if patch in bars:
            continue
        if not isinstance(patch, Rectangle):
            shapes += left_out(patch)
            continue
        x, y, width, height = *patch.get_xy(), patch.get_width(), patch.get_height()
        follows = branches(patch.get_data_transform(), axes)
        shapes.append(
            {
                "type": "rect",
                "layer": "below",
                "fillcolor": colour(patch.get_facecolor()),
                "line": {"width": 0},
                **ends((x, x + width), (y, y + height), follows),
            }
        )
    return shapes


def collection_traces(axes: Axes) -> list[Json]:
    from matplotlib.collections import LineCollection, PathCollection, PolyCollection

    traces: list[Json] = []
    for found in axes.collections:
        if isinstance(found, PathCollection):
            traces.append(points_trace(found))
        elif isinstance(found, PolyCollection):
            traces += [area_trace(found, path.vertices) for path in found.get_paths()]
        elif isinstance(found, LineCollection):
            traces.append(segments_trace(found))
        else:
            traces += left_out(found)
    return traces


def points_trace(found: Any) -> Json:
    label = str(found.get_label())
    places = found.get_offsets()
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "" if label.startswith("_") else label,
        "x": plain(places[:, 0]),
        "y": plain(places[:, 1]),
        "marker": {
            "color": [colour(face) for face in found.get_facecolors()] or "rgba(0,0,0,0)",
            "size": math.sqrt(found.get_sizes()[0]) * PX_PER_POINT,
            "line": {"color": [colour(e) for e in found.get_edgecolors()], "width": 1},
        },
    }


def area_trace(found: Any, corners: Any) -> Json:
    face = found.get_facecolor()
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "hoverinfo": "skip",
        "showlegend": False,
        "x": plain(corners[:, 0]),
        "y": plain(corners[:, 1]),
        "fillcolor": colour(face[0]) if len(face) else "rgba(0,0,0,0)",
        "line": {"width": 0},
    }


def segments_trace(found: Any) -> Json:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for segment in found.get_segments():
        xs += [*plain(segment[:, 0]), None]
        ys += [*plain(segment[:, 1]), None]
    return {
        "type": "scatter",
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "x": xs,
        "y": ys,
        "line": {"color": colour(found.get_color()[0]), "width": found.get_linewidth()[0]},
    }


# --- fields of colour -----------------------------------------------------------------------------


def image_traces(axes: Axes) -> list[Json]:
    return [image_trace(axes, image) for image in axes.images]


def image_trace(axes: Axes, image: Any) -> Json:
    """A field of cells; the words in a cell come with it."""
    from matplotlib.colors import LogNorm

    cells = np.ma.filled(image.get_array().astype(float), math.nan)
    rows, columns = cells.shape[:2]
    said = {
        (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text()
        for text in axes.texts
    }
    is_log = isinstance(image.norm, LogNorm)
    scale = math.log10 if is_log else float
    cmap = image.get_cmap()
    shares = [place / (NUM_COLOURS - 1) for place in range(NUM_COLOURS)]
    values = [[cell_value(cells, r, c) for c in range(columns)] for r in range(rows)]
    return {
        "type": "heatmap",
        "x": list(range(columns)),
        "y": list(range(rows)),
        "z": [[None if v is None else float(f"{scale(v):.6g}") for v in row] for row in values],
        "zmin": scale(image.norm.vmin),
        "zmax": scale(image.norm.vmax),
        "text": [[said.get((r, c), "") for c in range(columns)] for r in range(rows)],
        "texttemplate": "%{text}",
        "hovertemplate": "%{text}<extra></extra>",
        "colorscale": [[share, colour(cmap(share))] for share in shares],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }


def cell_value(cells: Any, row: int, column: int) -> float | None:
    """None where nothing was measured."""
    value = float(cells[row, column])
    return value if math.isfinite(value) else None


# --- words ----------------------------------------------------------------------------------------


def text_annotations(axes: Axes) -> list[Json]:
    """Every text in the axes but those that stand in the cells of a field."""
    if axes.images:
        return []
    return [annotation(axes, text) for text in axes.texts if text.get_text() and text.get_visible()]


def annotation(axes: Axes, text: Any) -> Json:
    (x, y), follows, (right, up) = anchor(text)
    weight = text.get_fontweight()
    is_bold = weight in ("bold", "semibold") or (isinstance(weight, int) and weight >= 600)
    said = words(text.get_text())
    if follows[0] and axes.get_xscale() == "log":
        x = math.log10(x)
    if follows[1] and axes.get_yscale() == "log":
        y = math.log10(y)
    align, vertical = text.get_ha(), text.get_va()
    return {
        "text": f"<b>{said}</b>" if is_bold else said,
        "x": plain([x])[0],
        "y": plain([y])[0],
        **references(follows),
        "xshift": right * PX_PER_POINT,
        "yshift": up * PX_PER_POINT,
        "xanchor": align,
        "yanchor": ANCHORS.get(vertical, vertical),
        "align": align,
        "showarrow": False,
        "textangle": -text.get_rotation(),
        "font": {"color": colour(text.get_color()), "size": text.get_fontsize() * 1.2},
    }


def anchor(text: Any) -> tuple[tuple[float, float], tuple[bool, bool], tuple[float, float]]:
    """(where, whether x and y are values of the axes, offset in points)."""
    from matplotlib.patches import Rectangle
    from matplotlib.text import Annotation

    if not isinstance(text, Annotation):
        x, y = text.get_position()
        return (float(x), float(y)), follows_data(text), (0.0, 0.0)
    has_offset = text.anncoords == "offset points"
    offset = text.xyann if has_offset else (0.0, 0.0)
    where = text.xy if has_offset or text.anncoords != "data" else text.xyann
    x, y = (float(value) for value in where)
    coordinates: Any = text.xycoords
    if isinstance(coordinates, Rectangle):  # the middle of a bar
        left, bottom = coordinates.get_xy()
        x, y = left + x * coordinates.get_width(), bottom + y * coordinates.get_height()
        return (x, y), (True, True), offset
    if isinstance(coordinates, str):
        coordinates = (coordinates, coordinates)
    if isinstance(coordinates, tuple):
        return (x, y), (coordinates[0] == "data", coordinates[1] == "data"), offset
    return (x, y), branches(coordinates, text.axes), offset


# --- the same as a table --------------------------------------------------------------------------


def panel_table(traces: Sequence[Json], horizontal: Json, vertical: Json) -> Table:
    """Every value that is drawn: name, place, value; of bars also where they begin."""
    x_title = unmarked(horizontal["title"]["text"]) or "x"
    y_title = unmarked(vertical["title"]["text"]) or "y"
    rows = [
        row
        for trace in traces
        if trace.get("hoverinfo") != "skip"
        for row in trace_rows(trace, horizontal, vertical)
    ]
    return ["", x_title, y_title], rows


def trace_rows(trace: Json, horizontal: Json, vertical: Json) -> list[list[str]]:
    name = trace.get("name", "")
    if trace["type"] == "heatmap":
        return [
            [trace["text"][row][column], shown(x, horizontal), shown(y, vertical)]
            for row, y in enumerate(trace["y"])
            for column, x in enumerate(trace["x"])
            if trace["z"][row][column] is not None
        ]
    if trace["type"] == "bar":
        return [
            [name, *bar_texts(trace, place, horizontal, vertical)]
            for place in range(len(trace["x"]))
        ]
    return [
        [name, shown(x, horizontal), shown(y, vertical)]
        for x, y in zip(trace["x"], trace["y"], strict=True)
    ]


def bar_texts(trace: Json, place: int, horizontal: Json, vertical: Json) -> tuple[str, str]:
    x, y, base = trace["x"][place], trace["y"][place], trace["base"][place]
    if trace["orientation"] == "h":
        return span(base, base + x, horizontal), shown(y, vertical)
    return shown(x, horizontal), span(base, base + y, vertical)


def span(start: float, end: float, axis: Json) -> str:
    """Where a bar ends; with its beginning where that is not the axis."""
    floor = 10 ** axis["range"][0] if axis["type"] == "log" else 0.0
    return (
        number(end)
        if math.isclose(start, floor, rel_tol=1e-4)
        else f"{number(start)} - {number(end)}"
    )


def shown(value: float | None, axis: Json) -> str:
    """A number, or the words that its tick has."""
    named = dict(zip(axis.get("tickvals", ()), axis.get("ticktext", ()), strict=True))
    return unmarked(named.get(value, number(value)))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}"


def unmarked(text: str) -> str:
    """`words` for where there is no HTML."""
    return text.replace("<br>", " ").replace("&lt;", "<").replace("&amp;", "&")
