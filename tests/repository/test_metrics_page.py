from __future__ import annotations

import re

import pytest
import yaml
from tools import dashboards, metrics

NAME = re.compile(r"cotenant_[a-z_]+")
SERIES = ("", "_bucket", "_count", "_sum")  # of a histogram


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Every series that we export to Prometheus."""
    names: set[str] = set()
    for metric in metrics.instruments():
        tails = SERIES[1:] if metric.kind == "histogram" else SERIES[:1]
        names.update(metrics.prometheus_name(metric) + tail for tail in tails)
    return names


def test_the_page_is_up_to_date() -> None:
    assert metrics.PAGE.read_text() == metrics.page(), "run `make docs`"


def test_every_instrument_has_a_part_a_description_and_a_known_unit() -> None:
    for metric in metrics.instruments():
        assert metric.name.split(".")[1] in metrics.PARTS, metric
        assert metric.description, metric
        assert metric.unit in metrics.UNITS or re.fullmatch(r"\{[a-z]+\}", metric.unit), metric


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_a_dashboard_is_up_to_date_and_queries_existing_metrics(name: str, exported: set[str]) -> None:
    render = (dashboards.DIRECTORY / f"{name}.json").read_text()
    assert render == dashboards.render(name), "run `make docs`"
    queried = set(NAME.findall(" ".join(query for panel in dashboards.BOARDS[name][1] for query, _ in panel.queries)))
    assert queried
    assert queried <= exported


def test_alerts_query_existing_metrics(exported: set[str]) -> None:
    groups = yaml.safe_load((dashboards.DIRECTORY.parent.parent / "alerts.yml").read_text())["groups"]
    queried = set(NAME.findall(" ".join(rule["expr"] for group in groups for rule in group["rules"])))
    assert queried
    assert queried <= exported
