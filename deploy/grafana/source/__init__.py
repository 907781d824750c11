"""The dashboards' source: those of the cluster, those of a job, and ``panels`` with what they share.

That is what queries have in common, the kinds of panels, what is chosen, marked and led to, and ``frame``, which makes
a dashboard of all that.
"""

from string import ascii_uppercase

from deploy.grafana.source.cluster import checkpoints, fleet, nodes, scheduler
from deploy.grafana.source.job import job, ranks
from deploy.grafana.source.panels import Encoder


def build() -> dict[str, str]:
    """The dashboards as Grafana imports them.

    Returns:
        File name → JSON. The same source gives the same text.
    """
    texts = {}
    for make in (fleet, job, ranks, scheduler, checkpoints, nodes):
        board = make().build()
        for number, panel in enumerate(board.panels or (), start=1):
            panel.id_val = number
            for letter, target in zip(ascii_uppercase, getattr(panel, "targets", None) or (), strict=False):
                target.ref_id = letter
        texts[f"{board.uid}.json"] = Encoder(indent=2, sort_keys=True).encode(board) + "\n"
    return texts
