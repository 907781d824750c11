"""Lines over time."""

from grafana_foundation_sdk.builders import common, timeseries
from grafana_foundation_sdk.models import common as looks

from deploy.grafana.source.datasource import PROMETHEUS
from deploy.grafana.source.panels import Query, by_name, over_time, tooltip
from deploy.grafana.source.promql import quantile

# Rates over ranks' steps have no value where no step ended; steps may take minutes. In milliseconds.
_GAP = 300_000


def time_series(title: str, says: str, unit: str, *queries: Query) -> timeseries.Panel:
    """Lines over time, from zero up."""
    return curves(title, says, unit, *queries).min(0)


def curves(title: str, says: str, unit: str, *queries: Query) -> timeseries.Panel:
    """Lines over time on an axis that fits them."""
    panel = timeseries.Panel().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).height(8).span(8)
    panel = panel.line_width(1).fill_opacity(8).show_points(looks.VisibilityMode.AUTO).span_nulls(_GAP)
    panel = panel.color_scheme(by_name()).legend(_legend()).tooltip(tooltip())
    return panel.targets(over_time(queries))


def quantiles(title: str, says: str, histogram: str) -> timeseries.Panel:
    """What half, nine of ten and 99 of 100 of a histogram's observations do not exceed, in seconds."""
    shares = {"half": 0.5, "90 %": 0.9, "99 %": 0.99}
    return time_series(title, says, "s", *(Query(quantile(below, histogram), name) for name, below in shares.items()))


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    """Areas that add up."""
    return panel.fill_opacity(40).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))


def stepped(panel: timeseries.Panel) -> timeseries.Panel:
    """Lines of whole numbers that jump."""
    return panel.fill_opacity(0).line_width(2).line_interpolation(looks.LineInterpolation.STEP_AFTER)


def counted(panel: timeseries.Panel) -> timeseries.Panel:
    """Bars of how many there were between a point and the one before."""
    return stacked(panel).draw_style(looks.GraphDrawStyle.BARS)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).display_mode(looks.LegendDisplayMode.LIST)
    return legend.placement(looks.LegendPlacement.BOTTOM)
