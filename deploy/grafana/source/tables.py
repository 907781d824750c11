"""Tables: a row for each combination of labels, a column for each label and each query."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.source import links
from deploy.grafana.source.datasource import PROMETHEUS
from deploy.grafana.source.panels import WIDTH, Query, target

OF_JOBS = {"job_name": "Job", "tenant": "Tenant", "job_id": "Id"}


class Column(NamedTuple):
    """A query's values under a heading; without one they are not shown, and the query is there for its labels."""

    heading: str
    unit: str
    expr: str


def table(title: str, says: str, labels: Mapping[str, str], columns: Sequence[Column]) -> tables.Panel:
    """What is so at this moment.

    Args:
        title: Of the panel.
        says: One sentence.
        labels: The labels that the queries' series have, in the order of their columns, with their headings. Those that
            only some have come from these, and join the rows of the others.
        columns: The queries.
    """
    panel = tables.Panel().title(title).description(says).datasource(PROMETHEUS).height(9).span(WIDTH)
    fields = _fields(len(columns))
    for place, column in enumerate(columns):
        panel = panel.with_target(target(Query(column.expr), place).instant().format(PromQueryFormat.TABLE))
    hidden = [field for field, column in zip(fields, columns, strict=True) if not column.heading]
    panel = panel.transformations(
        [DataTransformerConfig("merge", options={}), _arranged([*labels, *fields], ["Time", *hidden])]
    )
    for label, heading in labels.items():
        panel = panel.override_by_name(label, [DynamicConfigValue("displayName", heading), *_link(label)])
    for field, column in zip(fields, columns, strict=True):
        shown = {"displayName": column.heading, "unit": column.unit}
        panel = panel.override_by_name(field, [DynamicConfigValue(*option) for option in shown.items()])
    return panel


def _fields(queries: int) -> list[str]:
    """What Grafana calls the values of so many queries."""
    return ["Value"] if queries == 1 else [f"Value #{chr(ord('A') + place)}" for place in range(queries)]


def _arranged(order: Sequence[str], hidden: Sequence[str]) -> DataTransformerConfig:
    options = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {field: place for place, field in enumerate(order)},
        "renameByName": {},
    }
    return DataTransformerConfig("organize", options=options)


def _link(label: str) -> list[DynamicConfigValue]:
    if label != "job_name":
        return []
    return [DynamicConfigValue("links", [{"title": "Look at this job", "url": links.TO_JOB}])]
