"""The dashboard of docs/: what it draws is exported, and what is exported and matters is drawn."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"
NAME = re.compile(r"\b(?:vllm|nanoserve):\w+|\bprocess_\w+")
NOT_DRAWN = re.compile(r"process_|\w+:\w+_(?:bucket|sum|count|created)$")
"""What a process exports by itself, and parts of a histogram: drawing one of them will do."""


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every sample that a server shows which has answered once, with its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    from nanoserve.server.metrics import ServerMetrics

    metrics = ServerMetrics("mini")
    metrics.statuses["200"] += 1
    families = text_string_to_metric_families(metrics.text().decode())
    samples = itertools.chain.from_iterable(family.samples for family in families)
    return {sample.name: set(sample.labels) for sample in samples}


def expressions(dashboard: Any) -> list[str]:
    """Every query of it: panels and variables."""
    panels = [target["expr"] for p in dashboard["panels"] for target in p.get("targets", ())]
    variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    return [*panels, *variables]


def test_every_metric_that_is_drawn_is_exported(
    dashboard: Any, exported: dict[str, set[str]]
) -> None:
    drawn = [set(NAME.findall(expression)) for expression in expressions(dashboard)]
    assert all(drawn)
    assert set().union(*drawn) <= exported.keys()


def test_every_label_that_is_drawn_is_exported(
    dashboard: Any, exported: dict[str, set[str]]
) -> None:
    """`instance` is Prometheus' own, `le` belongs to buckets."""
    for expression in expressions(dashboard):
        wanted = set(re.findall(r"(\w+)=~", expression))
        wanted |= set(itertools.chain(*map(str.split, re.findall(r"by \(([^)]*)\)", expression))))
        for name in NAME.findall(expression):
            assert wanted <= exported[name] | {"instance"}, expression


def test_everything_of_ours_that_is_exported_is_drawn(
    dashboard: Any, exported: dict[str, set[str]]
) -> None:
    drawn = set(NAME.findall(" ".join(expressions(dashboard))))
    assert {name for name in exported if not NOT_DRAWN.match(name)} <= drawn
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    assert {h for h in histograms if not {f"{h}_bucket", f"{h}_sum"} & drawn} == set()


def test_panels_have_ids_and_places_of_their_own(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: list[tuple[int, int]] = []
    for place in (panel["gridPos"] for panel in panels):
        columns = range(place["x"], place["x"] + place["w"])
        assert columns.stop <= 24
        cells += itertools.product(columns, range(place["y"], place["y"] + place["h"]))
    assert len(set(cells)) == len(cells)


def test_it_asks_for_its_data_source(dashboard: Any) -> None:
    """An exported dashboard that names one is empty everywhere else."""
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    sources = {
        json.dumps(panel["datasource"]) for panel in dashboard["panels"] if "targets" in panel
    }
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
    assert "__inputs" not in dashboard
