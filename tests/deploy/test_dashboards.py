"""The dashboards, as far as they can be judged without a Grafana: what they ask for, and how they are laid out."""

import json
import re
from itertools import combinations
from pathlib import Path

import promql_parser
import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source import build
from deploy.grafana.source.panels import WIDTH, Encoder, Need
from tests.deploy.dashboards import CHOICES, Query, asked, dashboards, filled, need_of, panels, queries
from tests.deploy.exported import names, published

BOARDS = dashboards()

boards = pytest.mark.parametrize("uid", BOARDS)


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.dashboard}: {query.panel}")
def test_prometheus_would_understand_the_query(query: Query):
    promql_parser.parse(query.expr)


def test_what_prometheus_would_not_understand_is_found():
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (rank) rate(boost_rank_steps_total)")


def test_every_series_that_is_asked_for_is_one_that_somebody_exports(tmp_path: Path):
    exported = names(tmp_path)
    unknown = {(query.panel, name) for query in queries() for name in asked(promql_parser.parse(query.expr)) - exported}
    assert not unknown
    asked_for = {name for query in queries() for name in asked(promql_parser.parse(query.expr))}
    assert published() <= asked_for, "nobody asks for it any more"
    assert "boost_job_loss" not in exported


def test_the_names_in_a_query_are_found_wherever_they_are():
    query = "sum by (rank) (rate(a[1m])) / on () group_left () max(b offset 5m) or -c + max_over_time((d + e)[5m:1m])"
    assert asked(promql_parser.parse(query)) == set("abcde")


@boards
def test_nothing_is_asked_that_a_dashboard_has_no_choice_for(uid: str):
    board = BOARDS[uid]
    chosen = {variable["name"] for variable in board["templating"]["list"]}
    own = {"__interval", "__rate_interval", "__range", "__all", "__url_time_range", "__data"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) <= chosen | own


@boards
def test_ids_and_titles_are_unique_and_files_are_called_by_their_uids(uid: str):
    for what in ("id", "title"):
        values = [panel[what] for panel in BOARDS[uid]["panels"] if what == "id" or panel["type"] != "row"]
        assert len(set(values)) == len(values), values
    assert json.loads(build()[f"{uid}.json"])["uid"] == uid


@boards
def test_panels_fill_their_lines_and_none_overlaps(uid: str):
    places = [panel["gridPos"] for panel in BOARDS[uid]["panels"]]
    cells = [_cells(place) for place in places]
    assert all(one.isdisjoint(other) for one, other in combinations(cells, 2))
    lines = max(place["y"] + place["h"] for place in places)
    assert set().union(*cells) == {(x, y) for x in range(WIDTH) for y in range(lines)}


@boards
def test_every_panel_says_what_it_shows_and_in_which_unit(uid: str):
    for panel in panels(BOARDS[uid]):
        assert re.fullmatch(r"[A-Z][^.]+\.", panel["description"]), f"not one sentence: {panel['description']}"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for field in _values(panel):
            assert field["unit"], panel["title"]


@boards
def test_several_series_are_told_apart_by_their_legends(uid: str):
    for panel in panels(BOARDS[uid]):
        if panel["type"] not in ("stat", "table"):
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert all(legends), panel["title"]
            assert len(set(legends)) == len(legends), panel["title"]


@boards
def test_a_legend_names_only_labels_that_the_series_have(uid: str):
    for panel in panels(BOARDS[uid]):
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]) or "rank:" in target["expr"], panel[
                    "title"
                ]


@boards
def test_links_lead_to_dashboards_that_exist_and_to_pages_of_the_service(uid: str):
    text = json.dumps(BOARDS[uid])
    assert set(re.findall(r'"/d/([\w-]+)', text)) <= set(BOARDS)
    for path in re.findall(r"\$\{service_url\}([^\"]*)", text):
        assert re.fullmatch(r"/|/jobs/[^/]+", filled(path, CHOICES)), "the page knows / and /jobs/ID only"


@boards
def test_grafana_reads_what_the_sdk_means(uid: str):
    """The SDK's types are generated from Grafana's own: what they do not know is lost on the way through them."""
    board = BOARDS[uid]
    assert json.loads(Encoder().encode(Dashboard.from_json(board))) == board


def test_what_needs_more_than_a_machine_is_marked_in_the_source():
    assert need_of(Query("boost-ranks", "GPU power", "")) is Need.GPU
    assert need_of(Query("boost-ranks", "Steps", "")) is None
    assert {need_of(query) for query in queries()} == {None, *Need}
    for query in queries():
        assert (need_of(query) is Need.DCGM) == ("DCGM_" in query.expr), query
        assert (need_of(query) is Need.GPU) == ("boost_rank_gpu" in query.expr and "DCGM_" not in query.expr), query
        assert (need_of(query) is Need.NODE) == ("node_" in query.expr), query
        assert (need_of(query) is Need.KUBERNETES) == ("kube" in query.expr), query
        assert (need_of(query) is Need.RAY) == ("ray_" in query.expr), query
        assert (need_of(query) is Need.PEAK) == ("flops_utilization" in query.expr), query
        assert (need_of(query) is Need.CONTEXT) == ("context_imbalance" in query.expr), query


def _cells(place: dict[str, int]) -> set[tuple[int, int]]:
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return {(x, y) for x in columns for y in lines}


def _values(panel: dict) -> list[dict]:
    """The settings of a panel's values; a table has one for each query."""
    if panel["type"] != "table":
        return [panel["fieldConfig"]["defaults"]]
    overrides = [
        {option["id"]: option["value"] for option in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"].startswith("Value")
    ]
    assert len(overrides) == len(panel["targets"])
    return overrides
