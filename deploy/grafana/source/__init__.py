"""The dashboards' source: a file each, and ``panels`` with what they share.

That is what queries have in common, the kinds of panels, what is chosen, marked and led to, and ``frame``, which makes
a dashboard of all that.
"""

from collections.abc import Callable

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source.checkpoints import checkpoints
from deploy.grafana.source.fleet import fleet
from deploy.grafana.source.job import job
from deploy.grafana.source.nodes import nodes
from deploy.grafana.source.panels import encode
from deploy.grafana.source.ranks import ranks
from deploy.grafana.source.scheduler import scheduler

_DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "boost-fleet": fleet,
    "boost-job": job,
    "boost-ranks": ranks,
    "boost-scheduler": scheduler,
    "boost-checkpoints": checkpoints,
    "boost-nodes": nodes,
}


def build() -> dict[str, str]:
    """The dashboards as Grafana imports them.

    Returns:
        File name → JSON. The same source gives the same text.
    """
    return {f"{uid}.json": encode(make()) for uid, make in _DASHBOARDS.items()}
