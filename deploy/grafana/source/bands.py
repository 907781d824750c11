"""A band for each series, whose colour says its value over time."""

from grafana_foundation_sdk.builders import common, dashboard, statetimeline, statushistory
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import FieldColorModeId, ValueMap, ValueMappingResult

from deploy.grafana.source.datasource import PROMETHEUS
from deploy.grafana.source.panels import WIDTH, Query, over_time, tooltip

# Of a heat map. Grafana draws none that has more columns than fit.
_COLUMNS, _ROWS = 100, 64


def heat(title: str, says: str, unit: str, query: Query, low: float, high: float) -> statushistory.Panel:
    """A row of cells for each series, whose colour goes from blue at ``low`` to red at ``high``."""
    panel = statushistory.Panel().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).min(low).max(high).height(10).span(WIDTH).show_value(looks.VisibilityMode.NEVER)
    panel = panel.max_data_points(_COLUMNS).per_page(_ROWS)
    colours = dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD)
    panel = panel.color_scheme(colours).legend(common.VizLegendOptions().show_legend(False)).tooltip(tooltip())
    return panel.targets(over_time([query]))


def states(title: str, says: str, query: Query, meanings: dict[str, tuple[str, str]]) -> statetimeline.Panel:
    """A band for each series, which says what it is at each time; ``meanings``: value → text and colour."""
    panel = statetimeline.Panel().title(title).description(says).datasource(PROMETHEUS).unit("none")
    words = {value: ValueMappingResult(text, colour) for value, (text, colour) in meanings.items()}
    panel = panel.height(8).span(8).mappings([ValueMap(words)]).tooltip(tooltip())
    return panel.targets(over_time([query]))
