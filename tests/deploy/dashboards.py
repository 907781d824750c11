"""What Grafana would ask Prometheus for: every query of every dashboard, read from the JSON that Grafana reads."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import promql_parser

from deploy.grafana.source import build
from deploy.grafana.source.panels import Need

# What Grafana fills in, for tests that ask nobody.
CHOICES = {
    "tenant": ".*",
    "job_name": ".*",
    "job_id": "job-0123456789ab",
    "instance": ".*",
    "gpu_hour_price": "2.5",
    "__interval": "15s",
    "__rate_interval": "1m",
    "__range": "1h",
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((.+), *\w+\)")


class Query(NamedTuple):
    """One query; ``panel`` is a title that a dashboard has once, or ``variable …`` or ``annotation …``."""

    dashboard: str
    panel: str
    expr: str


@cache
def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards by their uids."""
    return {board["uid"]: board for board in map(json.loads, build().values())}


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A dashboard's panels, without the headings between them."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(choices: Mapping[str, str] | None = None, boards: Iterable[Mapping[str, Any]] | None = None) -> list[Query]:
    """All queries as Prometheus gets them.

    Args:
        choices: Values of the dashboards' variables and of Grafana's own; ``CHOICES`` has the others.
        boards: The dashboards; those that are shipped, if none are given.

    Raises:
        KeyError: A query names a variable that has no value.
    """
    values = {**CHOICES, **(choices or {})}
    return [
        Query(board["uid"], place, filled(expr, values))
        for board in boards or dashboards().values()
        for place, expr in _of_board(board)
    ]


def need_of(query: Query) -> Need | None:
    """What the query gives nothing without; the panel's source says so."""
    said = [
        panel["fieldConfig"]["defaults"].get("noValue")
        for panel in panels(dashboards()[query.dashboard])
        if panel["title"] == query.panel
    ]
    return next((need for need in Need if need in said), None)


def asked(expr: Any) -> set[str]:
    """The names of the series that a parsed query reads."""
    if isinstance(expr, promql_parser.VectorSelector):
        return {expr.name}
    parts = [getattr(expr, part, None) for part in ("expr", "param", "lhs", "rhs", "vector_selector")]
    return set().union(*(asked(part) for part in (*parts, *getattr(expr, "args", ())) if part is not None))


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its variables' values."""
    return _VARIABLE.sub(lambda name: values[name[1] or name[2]], text)


def _of_board(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selector = _LABEL_VALUES.fullmatch(variable["query"])
            assert selector, f"not label_values(…, label): {variable['query']}"
            yield f"variable {variable['name']}", selector[1]
    for annotation in board["annotations"].get("list", ()):
        yield f"annotation {annotation['name']}", annotation["expr"]
