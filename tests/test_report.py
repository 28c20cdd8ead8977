"""The report beyond its texts: order of sections, traps, pictures read back, the page of it all.

Runs are those of `results/`; what they say may change, how it is told may not.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from nanoserve.bench import page, report
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.interactive import Panel, interactive, words
from nanoserve.bench.record import Run, find_runs, full_name
from nanoserve.bench.report import Results, Told
from nanoserve.bench.traps import TRAPS

ROOT = Path(__file__).parents[1]
NO_LIBRARY = "/* plotly.js stands here */"


@pytest.fixture(scope="module")
def recorded() -> Run:
    """A complete, full run of kvcache."""
    runs, skipped = find_runs(ROOT / report.RESULTS_FOLDER, "kvcache")
    assert skipped == []
    return runs[0]


@pytest.fixture(scope="module")
def told(recorded: Run) -> Results:
    return report.results_of([recorded])


# --- names and order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, executor, expected",
    [
        ("cpu", "native", "gpt2-cpu"),
        ("cpu", "eager", "gpt2-cpu-eager"),
        ("cuda", "eager", "gpt2-cuda"),
        ("cuda", "native", "gpt2-cuda-native"),
        ("cpu", "none", "gpt2-cpu"),  # yardsticks run no executor
        ("cpu", None, "gpt2-cpu"),
    ],
)
def test_a_runs_name_says_its_executor_unless_it_is_the_usual_one(
    device: str, executor: str | None, expected: str
) -> None:
    ran = {"device": device, "executor": executor}
    assert full_name("gpt2-cpu".replace("cpu", device), ran) == expected
    assert full_name(expected, ran) == expected


def entries(*names: str) -> dict[str, list[Any]]:
    return {name: [object()] for name in names}


def test_the_nine_questions_come_first_and_yardsticks_last() -> None:
    found = Results(chapters=entries("ceilings", "overhead", "batching", "kvcache", "batch"))
    assert [section.experiment for section in found.sections] == [
        "kvcache",
        "batch",
        "batching",
        "overhead",
        "ceilings",
    ]
    assert [section.number for section in found.sections] == ["1", "2", "7", "", ""]


def test_a_second_experiment_of_a_question_shares_its_number() -> None:
    numbers = report.numbered_experiments()
    assert (numbers["precision"], numbers["int8"], numbers["peers"]) == ("6", "6b", "9")


def test_chapters_leave_numbers_to_the_report() -> None:
    for chapter in CHAPTERS.values():
        assert not chapter.title[0].isdigit()
        assert chapter.tables


def test_the_usual_executor_is_told_before_others(recorded: Run) -> None:
    def with_executor(executor: str) -> Run:
        return Run(header={**recorded.header, "executor": executor}, records=recorded.records)

    runs = [with_executor("eager"), with_executor("native")]
    told = report.told_runs(CHAPTERS["kvcache"], runs)
    assert [entry.run.header["executor"] for entry in told] == ["native", "eager"]
    assert [entry.is_main for entry in told] == [True, False]
    assert told[0].heading.endswith(", native executor")


def test_a_run_names_its_own_ceilings(recorded: Run) -> None:
    said = report.provenance(recorded)
    assert re.search(r"measured between the arms: [\d.]+ GB/s read, \d+ GFLOP/s \(float32\)", said)
    before = Run(header=recorded.header, records=recorded.records[-1:])
    assert "Its own ceilings" not in "".join(
        report.ceilings_sentence(Run(header={}, records=before.records))
    )
    assert "measured before the arms: " in report.ceilings_sentence(before)[0]


# --- traps ----------------------------------------------------------------------------------------


def test_traps_type_no_number_and_add_what_records_say(told: Results) -> None:
    for trap in TRAPS:
        assert not re.search(r"\d", trap.looks + trap.avoided)
        assert trap.measured({}) == []
    parts = report.traps_parts(told)
    assert len(parts) == len(TRAPS) + 2
    text = "\n".join(parts)
    assert re.search(r"Here one prefill of [\d,]+ tokens takes [\d,.]+ ms, as long as \d+", text)
    assert re.search(r"mean of the gains at \d+ contexts is [\d.]+x", text)
    assert re.search(r"a full window has [\d.]+ MiB of them in fp32", text)


# --- pictures read back ---------------------------------------------------------------------------


def figure_of(*, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure()
    return figure, figure.subplots(1, columns, **options)


def only_panel(figure: Figure) -> Panel:
    (panel,) = interactive(figure).panels
    return panel


def test_lines_come_with_their_look_and_the_name_that_stands_in_their_colour() -> None:
    figure, axes = figure_of()
    axes.plot([1, 2, 4], [10.0, math.nan, 30.0], color="#0072B2", marker="o")
    axes.plot([1, 4], [9, 31], color="#0072B2", dashes=(4, 3))
    axes.plot([1, 4], [1, 1], color="#D55E00", label="other")
    axes.annotate("cached", (4, 30), xytext=(7, 3), textcoords="offset points", color="#0072B2")
    axes.legend()
    panel = only_panel(figure)
    measured, predicted, other = panel.traces
    assert (measured["x"], measured["y"]) == ([1, 2, 4], [10, None, 30])
    assert (measured["mode"], predicted["mode"]) == ("lines+markers", "lines")
    assert (measured["line"]["dash"], predicted["line"]["dash"]) == ("solid", "dash")
    names = [trace["name"] for trace in panel.traces]
    assert names == ["cached", "cached (dashed)", "other"]
    assert other["line"]["color"] == "#d55e00"
    assert panel.layout["showlegend"]
    assert ["cached", "4", "30"] in panel.table[1]
    (note,) = panel.layout["annotations"]
    assert (note["x"], note["y"], note["xref"], note["yref"]) == (4, 30, "x", "y")
    assert note["xshift"] == pytest.approx(7 * 4 / 3)


def test_axes_keep_scale_range_and_ticks() -> None:
    figure, axes = figure_of()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(1, 8)
    axes.set_ylim(100, 10)
    axes.set_xticks([1, 8], ["one\nMiB", "eight"])
    axes.set_xlabel("context <tokens>")
    axes.annotate("here", (2, 50))
    axes.text(0.5, 0.9, "corner", transform=axes.transAxes)
    panel = only_panel(figure)
    x, y = panel.layout["xaxis"], panel.layout["yaxis"]
    assert (x["type"], x["tickvals"], x["ticktext"]) == ("log", [1, 8], ["one<br>MiB", "eight"])
    assert x["title"]["text"] == "context &lt;tokens>"
    assert y["range"] == [2, 1]
    here, corner = panel.layout["annotations"]
    assert (here["x"], here["y"]) == pytest.approx((math.log10(2), math.log10(50)), rel=1e-5)
    assert (corner["xref"], corner["yref"], corner["y"]) == ("x domain", "y domain", 0.9)


def test_bars_that_look_alike_are_one_trace() -> None:
    figure, axes = figure_of()
    for slot, start in ((0, 0.0), (1, 2.0), (0, 3.0)):
        axes.barh(slot, 1.5, left=start, color="#0072B2")
    axes.barh(1, 1.0, left=3.5, facecolor="white", edgecolor="#999999", hatch="////")
    panel = only_panel(figure)
    solid, hatched = panel.traces
    assert (solid["orientation"], solid["base"], solid["x"]) == ("h", [0, 2, 3], [1.5] * 3)
    assert hatched["marker"]["pattern"]["shape"] == "/"
    assert ["", "2 - 3.5", "1"] in panel.table[1]
    assert ["", "1.5", "0"] in panel.table[1]


def test_bars_on_a_logarithmic_axis_stand_on_its_edge() -> None:
    figure, axes = figure_of()
    bars = axes.bar(["a", "b"], [10, 100], label="speed")
    axes.bar_label(bars)
    axes.set_yscale("log")
    axes.set_ylim(1, 1000)
    panel = only_panel(figure)
    (trace,) = panel.traces
    assert (trace["base"], trace["y"], trace["name"]) == ([1, 1], [9, 99], "speed")
    assert panel.table[1] == [["speed", "a", "10"], ["speed", "b", "100"]]
    assert len(panel.layout["annotations"]) == 2


def test_bands_points_and_segments_are_kept() -> None:
    figure, axes = figure_of()
    axes.fill_between([0, 1], [1, 2], [3, 4], color="#0072B2", alpha=0.25)
    axes.scatter([0, 1], [5, 6], color="#D55E00")
    axes.vlines([0.5], [0], [1])
    area, points, segments = only_panel(figure).traces
    assert area["fill"] == "toself"
    assert area["fillcolor"] == "rgba(0,114,178,0.25)"
    assert (points["mode"], points["y"]) == ("markers", [5, 6])
    assert segments["x"] == [0.5, 0.5, None]


def test_lines_and_spans_across_the_axes_are_shapes() -> None:
    figure, axes = figure_of()
    axes.axhline(1.5, color="#222222", dashes=(2, 2))
    axes.axvspan(1, 2, color="#BBBBBB")
    line, span = only_panel(figure).layout["shapes"]
    assert (line["type"], line["y0"], line["xref"], line["yref"]) == ("line", 1.5, "x domain", "y")
    assert (span["type"], span["x0"], span["x1"], span["yref"]) == ("rect", 1, 2, "y domain")


def test_a_field_of_colour_keeps_its_words_and_its_gaps() -> None:
    figure, axes = figure_of()
    image = axes.imshow([[1.0, np.nan], [10.0, 100.0]], norm=LogNorm(vmin=1, vmax=100))
    axes.text(1, 1, "100x")
    figure.colorbar(image)
    panel = only_panel(figure)
    (trace,) = panel.traces
    assert trace["z"] == [[0, None], [1, 2]]
    assert trace["text"][1][1] == "100x"
    assert (trace["zmin"], trace["zmax"]) == (0, 2)
    assert panel.layout["annotations"] == []
    assert len(panel.table[1]) == 3


def test_panels_on_one_axis_are_linked() -> None:
    figure, (left, right) = figure_of(columns=2, sharex=True)
    for axes in (left, right):
        axes.plot([1, 2], [1, 2])
    assert [panel.linked for panel in interactive(figure).panels] == [0, 0]
    figure, (left, right) = figure_of(columns=2)
    assert [panel.linked for panel in interactive(figure).panels] == [None, None]


def test_what_cannot_be_read_back_is_said(caplog: pytest.LogCaptureFixture) -> None:
    figure, axes = figure_of()
    assert isinstance(axes, Axes)
    axes.add_patch(Circle((0, 0), 1))
    with caplog.at_level(logging.WARNING):
        assert only_panel(figure).layout["shapes"] == []
    assert "not drawn on the page: Circle" in caplog.text


# --- the page -------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Elements with their attributes, and whether every one that opens is closed."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def attributes(self, tag: str, name: str) -> list[str]:
        return [value for t, a in self.found if t == tag and (value := a.get(name)) is not None]


@pytest.fixture(scope="module")
def text(told: Results) -> str:
    return page.page(told, NO_LIBRARY)


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_the_page_needs_no_network(text: str, read: Reader) -> None:
    assert "://" not in text
    assert read.attributes("script", "src") == []
    assert read.attributes("link", "href") == []
    (policy,) = [value for value in read.attributes("meta", "content") if "default-src" in value]
    assert policy.startswith("default-src 'none'")


def test_everything_on_the_page_has_a_name(told: Results, read: Reader) -> None:
    plots = [a for tag, a in read.found if tag == "div" and a.get("class") == "plot"]
    assert len(plots) >= 2
    assert all(attributes["aria-label"] and attributes["role"] == "img" for attributes in plots)
    ids = [value for tag in ("section", "figure", "div") for value in read.attributes(tag, "id")]
    assert len(ids) == len(set(ids))
    for target in read.attributes("a", "href"):
        assert target.removeprefix("#") in ids
    tables = [tag for tag, _ in read.found].count("table")
    assert tables == [tag for tag, _ in read.found].count("caption") > 3
    assert set(read.attributes("th", "scope")) == {"col", "row"}


def test_the_page_tells_what_the_report_tells(told: Results, text: str) -> None:
    (section,) = told.sections
    (entry,) = section.runs
    assert section.title in text
    assert page.prose(section.chapter.paragraph(entry.findings)) in text
    assert page.prose(report.provenance(entry.run)) in text
    for trap in TRAPS:
        assert page.prose(trap.avoided).removeprefix("<p>") in text


def test_the_data_of_every_panel_are_there_as_json(read: Reader) -> None:
    blobs = [script for script in read.scripts if script.startswith('{"traces"')]
    assert blobs
    for blob in blobs:
        data = json.loads(blob)
        assert data["traces"]
        assert {"xaxis", "yaxis", "annotations"} <= data["layout"].keys()


def test_the_page_is_a_pure_function(told: Results, text: str) -> None:
    assert page.page(told, NO_LIBRARY) == text


def test_no_text_breaks_out_of_the_page() -> None:
    table = (["<b>", "x"], [["<script>", "1"]])
    shown = page.table_html('"</table>', table)
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert '"</table>"' not in shown
    assert "</script" not in page.script("a</script>b")
    panel = Panel(
        title="</script>",
        traces=[{"name": "</script>"}],
        layout={},
        table=([], []),
        height_px=300,
        linked=None,
    )
    assert page.panel_html("a", "a", panel, "alt").count("</script>") == 1


def test_the_page_brings_the_library_along(told: Results, tmp_path: Path) -> None:
    path = page.write(tmp_path / "new" / "report.html", Results())
    assert path.stat().st_size > 2**20
    assert "Plotly" in path.read_text(encoding="utf-8")


def test_without_the_library_there_is_no_page(
    told: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError):
        page.write(tmp_path / "report.html", told)
    assert list(tmp_path.iterdir()) == []


def test_headings_name_the_executor(told: Results) -> None:
    entry = told.sections[0].runs[0]
    assert isinstance(entry, Told)
    assert entry.heading.endswith(f", {entry.run.header['executor']} executor")


def test_numbers_of_numpy_reach_the_page_and_nothing_else_does() -> None:
    assert json.dumps(np.int64(3), default=page.plain) == "3"
    assert json.dumps([np.float32(0.5), np.bool_(True)], default=page.plain) == "[0.5, true]"
    with pytest.raises(TypeError, match="object has no place"):
        json.dumps(object(), default=page.plain)


def test_a_power_of_ten_is_written_for_a_browser() -> None:
    assert words(r"$\mathdefault{10^{-7}}$") == "10<sup>-7</sup>"
    assert words("a < b & c") == "a &lt; b &amp; c"
