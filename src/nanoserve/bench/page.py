"""One self-contained page for a browser: every section with its pictures to zoom and its tables.

The page asks no network for anything, and its own policy forbids it to: plotly.js, style and data
are inside. It tells the same sections as RESULTS.md, from the same records, by the same functions;
its pictures are read back from the drawings of `plots`, and below each stand its values. The same
records and libraries give the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.bench.findings import Table, machine_name
from nanoserve.bench.interactive import Interactive, Panel, interactive
from nanoserve.bench.plots import STYLE
from nanoserve.bench.report import YARDSTICKS, Results, Section, Told, provenance
from nanoserve.bench.traps import TRAPS, TRAPS_INTRODUCTION, TRAPS_TITLE

if TYPE_CHECKING:
    from nanoserve.bench.chapters import Picture

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
PAGE_FILE = "report.html"
DATA = files("nanoserve.bench") / "data"
TRAPS_ID = "traps"
NUMERIC = re.compile(r"[-+±\d.,]+")


def write(path: Path, results: Results) -> Path:
    """Write the page. Raises ModuleNotFoundError without plotly or matplotlib."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    text = page(results, get_plotlyjs())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def page(results: Results, plotly_js: str) -> str:
    """The whole document."""
    sections = results.sections
    body = "\n".join(
        [
            header(sections),
            "<main>",
            *(section_html(s) for s in sections if s.experiment != YARDSTICKS),
            traps_html(results),
            *(section_html(s) for s in sections if s.experiment == YARDSTICKS),
            "</main>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>nanoserve: what a KV cache buys</title>\n<style>{asset('page.css')}</style>\n"
        f"</head>\n<body>\n{body}\n"
        f"<script>{script(plotly_js)}</script>\n"
        f"<script>{asset('page.js')}</script>\n</body>\n</html>\n"
    )


def script(code: str) -> str:
    """Code that may stand in a document: nothing in it ends the element that it stands in."""
    return code.replace("</script", r"<\/script")


def asset(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def header(sections: Iterable[Section]) -> str:
    """Title, machines, the switch of the theme, and a link to every section."""
    sections = list(sections)
    machines = dict.fromkeys(machine_name(told.run) for s in sections for told in s.runs)
    links = [(section_id(s), s.title) for s in sections if s.experiment != YARDSTICKS]
    links += [(TRAPS_ID, TRAPS_TITLE)]
    links += [(section_id(s), s.title) for s in sections if s.experiment == YARDSTICKS]
    items = "\n".join(f'<li><a href="#{i}">{escape(title)}</a></li>' for i, title in links)
    return (
        '<header>\n<button id="theme" type="button">Theme: as the system</button>\n'
        "<h1>What does a KV cache buy, and what does it cost?</h1>\n"
        f"<p>Measured with nanoserve on {escape('; '.join(machines) or 'nothing yet')}. Every "
        "number is computed from recorded repetitions. In a picture: drag to zoom, double-click "
        "to come back, hover or open <em>the values</em> for absolute numbers.</p>\n"
        f'<nav aria-label="Sections"><ul>\n{items}\n</ul></nav>\n'
        "<noscript><p>The pictures need JavaScript; every value is in the tables.</p></noscript>\n"
        "</header>"
    )


def section_id(section: Section) -> str:
    return section.experiment


def section_html(section: Section) -> str:
    """One experiment: its title, and every run."""
    runs = "\n".join(run_html(section, told) for told in section.runs)
    return (
        f'<section id="{section_id(section)}" aria-labelledby="{section_id(section)}-title">\n'
        f'<h2 id="{section_id(section)}-title">{escape(section.title)}</h2>\n{runs}\n</section>'
    )


def run_html(section: Section, told: Told) -> str:
    """One run: meaning, pictures, tables, notes, provenance."""
    chapter, findings = section.chapter, told.findings
    parts = [f"<h3>{escape(told.heading)}</h3>", prose(chapter.paragraph(findings))]
    parts += [
        picture_html(told.stem(name), picture, told) for name, picture in chapter.pictures.items()
    ]
    for caption, table in chapter.filled_tables(findings).items():
        parts.append(table_html(caption, table))
    if chapter.notes is not None:
        parts.append(prose(chapter.notes(findings)))
    return "\n".join([*parts, f'<div class="provenance">{prose(provenance(told.run))}</div>'])


def traps_html(results: Results) -> str:
    runs = {name: [told.findings for told in runs] for name, runs in results.chapters.items()}
    parts = [
        f"<h3>{escape(trap.name)}</h3>\n"
        + prose(" ".join([trap.looks, *trap.measured(runs), trap.avoided]))
        for trap in TRAPS
    ]
    return (
        f'<section id="{TRAPS_ID}" aria-labelledby="{TRAPS_ID}-title">\n'
        f'<h2 id="{TRAPS_ID}-title">{escape(TRAPS_TITLE)}</h2>\n{prose(TRAPS_INTRODUCTION)}\n'
        + "\n".join(parts)
        + "\n</section>"
    )


def prose(text: str) -> str:
    """A paragraph; what stands between backticks is code."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return f"<p>{marked}</p>"


def picture_html(stem: str, picture: Picture[Any], told: Told) -> str:
    """One picture: its message, its panels, what ran, and every value as a table."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        made = interactive(picture.draw(picture.data(told.findings)))
    panels = "\n".join(
        panel_html(f"{stem}-{number}", stem, panel, picture.alt)
        for number, panel in enumerate(made.panels)
    )
    return (
        f'<figure id="figure-{escape(stem)}">\n<figcaption>{caption_html(made, picture)}'
        f'</figcaption>\n<div class="panels">\n{panels}\n</div>\n{values_html(made)}\n</figure>'
    )


def caption_html(made: Interactive, picture: Picture[Any]) -> str:
    headline = made.headline or picture.alt
    subject = "<br>".join(escape(line) for line in made.subject.splitlines())
    return f"<strong>{escape(headline)}</strong><small>{subject}</small>"


def panel_html(name: str, stem: str, panel: Panel, alt: str) -> str:
    """A place for one panel, and its data as JSON that no markup can break out of."""
    data = {"traces": panel.traces, "layout": panel.layout}
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), default=plain)
    text = text.replace("<", "\\u003c")
    label = ": ".join(filter(None, (alt, panel.title)))
    linked = "" if panel.linked is None else f' data-linked="{escape(stem)}-{panel.linked}"'
    kind = "panel whole" if linked else "panel"
    return (
        f'<div class="{kind}"><h4>{escape(panel.title)}</h4>\n'
        f'<div class="plot" id="{escape(name)}" role="img" aria-label="{escape(label)}"'
        f'{linked} style="height:{panel.height_px}px"></div>\n'
        f'<script type="application/json">{text}</script></div>'
    )


def values_html(made: Interactive) -> str:
    tables = "\n".join(
        table_html(panel.title or made.headline, panel.table) for panel in made.panels
    )
    return f"<details><summary>The values of this picture</summary>\n{tables}\n</details>"


def table_html(caption: str, table: Table) -> str:
    """A table that scrolls by itself where the page is narrow; a row begins with its heading."""
    heads, rows = table
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = "\n".join(
        "<tr>" + "".join(cell_html(text, place) for place, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def cell_html(text: str, place: int) -> str:
    if place == 0:
        return f'<th scope="row">{escape(text)}</th>'
    kind = "" if NUMERIC.match(text) else ' class="words"'
    return f"<td{kind}>{escape(text)}</td>"


def plain(value: Any) -> Any:
    """A number of numpy's, which a drawing may hold, as Python's. Raises TypeError for all else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place on the page")
