"""Single values in large, and bars."""

from grafana_foundation_sdk.builders import bargauge, common, dashboard, stat
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

from deploy.grafana.source.datasource import PROMETHEUS
from deploy.grafana.source.panels import Query, by_name, of_now, over_time


def number(title: str, says: str, unit: str, query: Query) -> stat.Panel:
    """The newest value in large, with its course behind it."""
    panel = stat.Panel().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).height(4).span(4).color_mode(looks.BigValueColorMode.VALUE)
    panel = panel.graph_mode(looks.BigValueGraphMode.AREA).reduce_options(_newest())
    return panel.thresholds(levels("text")).targets(over_time([query]))


def count(title: str, says: str, unit: str, query: Query) -> stat.Panel:
    """The value of this moment in large; 0 where there is no series, because nothing is there to be counted."""
    panel = number(title, says, unit, query).graph_mode(looks.BigValueGraphMode.NONE).no_value("0")
    return panel.targets(of_now([query]))


def word(title: str, says: str, query: Query, otherwise: str) -> stat.Panel:
    """What the only series of this moment is called, in large; ``otherwise`` where there is none."""
    panel = count(title, says, "none", query).no_value(otherwise)
    return panel.text_mode(looks.BigValueTextMode.NAME)


def bars(title: str, says: str, unit: str, *queries: Query) -> bargauge.Panel:
    """A bar for each series, of this moment."""
    panel = bargauge.Panel().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).min(0).height(8).span(8).color_scheme(by_name())
    panel = panel.display_mode(looks.BarGaugeDisplayMode.BASIC).orientation(looks.VizOrientation.HORIZONTAL)
    return panel.reduce_options(_newest()).targets(of_now(queries))


def levels(lowest: str, *steps: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Colours of values: ``lowest`` below all ``steps``, and from each step on its own."""
    thresholds = [Threshold(None, lowest), *(Threshold(value, colour) for value, colour in steps)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(thresholds)


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
