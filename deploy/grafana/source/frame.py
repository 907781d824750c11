"""What all dashboards have in common, and their JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardCursorSync,
    DashboardLink,
    Panel,
)

from deploy.grafana.source import links, variables

_REFRESH = "15s"  # as often as the shipped Prometheus scrapes; the chart says how often its Prometheus does


class Row(NamedTuple):
    """Panels under a heading. They fill lines from the left; the next begins where their spans reach the full width."""

    title: str
    panels: Sequence[Builder[Panel]]


def frame(uid: str, title: str, says: str, rows: Sequence[Row]) -> dashboard.Dashboard:
    """A dashboard with its rows, to which variables, marks and links are still to be added."""
    board = dashboard.Dashboard(title).uid(uid).description(says).tags([links.TAG]).timezone("browser")
    board = board.refresh(_REFRESH).time("now-1h", "now").tooltip(DashboardCursorSync.CROSSHAIR).editable()
    board = board.variables([variables.datasource(), variables.service_url()]).link(links.to_all())
    for row in rows:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(panel)
    return board


class Encoder(JSONEncoder):
    """The SDK's, but links and the switches of marks stay in sight: it would put all of them into a menu."""

    def default(self, obj: Any) -> Any:
        """What JSON knows no way to write."""
        plain = super().default(obj)
        if isinstance(obj, DashboardLink | AnnotationQuery):
            del plain["placement"]
        return plain


def encode(board: dashboard.Dashboard) -> str:
    """A dashboard as Grafana imports it; the same text for the same source."""
    built = board.build()
    _number(built)
    return Encoder(indent=2, sort_keys=True).encode(built) + "\n"


def _number(board: Dashboard) -> None:
    for number, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number
