"""The report's page in a real browser, opened as a file: it draws, asks no network, and is usable.

The page is that of the records in `results/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nanoserve.bench import page, report

ROOT = Path(__file__).parents[2]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@dataclass
class Opened:
    """The page as it stands in the browser, and what it complained of or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def wait(self) -> None:
        self.page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = report.load(ROOT / report.RESULTS_FOLDER)
    assert results.sections
    return page.write(tmp_path_factory.mktemp("page") / "report.html", results)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, document: Path, **options: Any) -> Opened:
    shown = Opened(page=browser.new_context(**options).new_page())
    shown.page.on("console", lambda message: shown.complaints.append(message.text))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("request", lambda request: shown.requests.append(request.url))
    shown.page.goto(document.as_uri())
    shown.wait()
    return shown


def test_every_figure_is_drawn_without_error_or_network(browser: Any, document: Path) -> None:
    shown = opened(browser, document, viewport=WIDE)
    places = shown.page.locator(".plot")
    num_pictures = len(report.plot_data(report.load(ROOT / report.RESULTS_FOLDER)))
    assert shown.page.locator("figure").count() == num_pictures > 0
    assert places.count() >= num_pictures
    for number in range(places.count()):
        place = places.nth(number)
        marks = place.locator(".trace, .heatmaplayer image, .hm")
        assert marks.count() > 0, place.get_attribute("id")
        assert place.get_attribute("aria-label")
        box = place.locator(".main-svg").first.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 200
    assert shown.complaints == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_theme_follows_the_system_and_the_switch(browser: Any, document: Path) -> None:
    shown = opened(browser, document, viewport=WIDE, color_scheme="dark")
    dark = shown.page.evaluate(BACKGROUND)
    first = shown.page.locator(".plot .ytick text").first
    ink_on_dark = first.evaluate("mark => getComputedStyle(mark).fill")
    shown.page.click("#theme")  # from the system's to light
    shown.wait()
    light = shown.page.evaluate(BACKGROUND)
    assert (dark, light) == ("rgb(21, 21, 23)", "rgb(255, 255, 255)")
    assert first.evaluate("mark => getComputedStyle(mark).fill") != ink_on_dark
    shown.page.click("#theme")
    assert shown.page.evaluate(BACKGROUND) == dark
    assert shown.complaints == []


def test_a_phone_scrolls_down_and_not_sideways(browser: Any, document: Path) -> None:
    shown = opened(browser, document, viewport=PHONE)
    width = shown.page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    for box in (place.bounding_box() for place in shown.page.locator(".plot").all()):
        assert box["width"] <= PHONE["width"]


def test_links_and_tables_lead_somewhere(browser: Any, document: Path) -> None:
    shown = opened(browser, document, viewport=WIDE)
    targets = [link.get_attribute("href") for link in shown.page.locator("nav a").all()]
    assert len(targets) > 3
    for target in targets:
        assert shown.page.locator(target).count() == 1
    details = shown.page.locator("figure details").first
    details.locator("summary").click()
    assert details.locator("tbody tr").count() > 5


def test_panels_on_one_time_axis_are_zoomed_together(browser: Any, document: Path) -> None:
    shown = opened(browser, document, viewport=WIDE)
    linked = shown.page.locator(".plot[data-linked]")
    assert linked.count() >= 2
    change = "place => Plotly.relayout(place, {'xaxis.range[0]': 1, 'xaxis.range[1]': 2})"
    linked.nth(0).evaluate(change)
    follower = linked.nth(1).element_handle()
    shown.page.wait_for_function("place => place.layout.xaxis.range[1] === 2", arg=follower)
