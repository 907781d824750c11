"""What all kinds of panels share.

A panel has a title, one sentence that says what it shows, and a unit. What else is particular to it is set on it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import FieldColorModeId
from grafana_foundation_sdk.models.prometheus import QueryEditorMode

from deploy.grafana.source.datasource import PROMETHEUS

WIDTH = 24  # of Grafana's grid


class Need(StrEnum):
    """What a panel cannot show anything without, said in its place: ``panel.no_value(Need.GPU)``."""

    GPU = "No NVIDIA GPU here"
    DCGM = "No GPU of this job in Prometheus from NVIDIA's DCGM exporter"
    NODE = "No node_exporter in Prometheus"
    KUBERNETES = "Nothing in Prometheus from the kubelet or kube-state-metrics"
    RAY = "Ray's own metrics are not in Prometheus"
    PEAK = "The peak of this device is not known"
    ALERT = "Nothing fires"
    CONTEXT = "Each sequence is on one rank"
    HALF_AN_HOUR = "The job has not run for half an hour yet"


class Query(NamedTuple):
    """PromQL, and what its series are called: text with ``{{label}}``."""

    expr: str
    legend: str = ""


def target(query: Query, place: int) -> prometheus.Dataquery:
    """A panel's query; the first ``place`` is 0."""
    asked = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).datasource(PROMETHEUS)
    return asked.editor_mode(QueryEditorMode.CODE).ref_id(chr(ord("A") + place))


def over_time(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    """How they were over the time that is looked at."""
    return [target(query, place) for place, query in enumerate(queries)]


def of_now(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    """How they are at its end."""
    return [target(query, place).instant() for place, query in enumerate(queries)]


def by_name() -> dashboard.FieldColor:
    """Colours that a series keeps when others come and go."""
    return dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME)


def tooltip() -> common.VizTooltipOptions:
    """All series at the place of the pointer, the largest first."""
    return common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
