"""What all kinds of panels share.

A panel has a title, one sentence that says what it shows, and a unit. What else is particular to it is set on it.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from string import ascii_uppercase
from typing import Any, NamedTuple, Self, cast

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders.dashboard import AnnotationQuery as Marks
from grafana_foundation_sdk.builders.dashboard import ConstantVariable, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.builders.dashboard import DashboardLink as Link
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models.common import DataSourceRef, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

# PromQL that all dashboards share. Several replicas of the API may be scraped, and each shows the same series of a job,
# so what comes from the API's record is read with ``max by``. A rank's series come from its one process and are summed.

JOB = 'job_id="$job_id"'
JOBS = 'tenant=~"$tenant", job_name=~"$job_name"'
TENANTS = 'tenant=~"$tenant"'
NAMES = ("job_id", "job_name", "tenant")
EARLIER = " offset $__interval"  # as of one point of the graph before


def newest(metric: str, where: str = "", *by: str, offset: str = "") -> str:
    """A gauge of the record, once for each value of ``by`` however many replicas show it; with ``EARLIER`` before."""
    return total(f"{metric}{{{where}}}{offset}" if where else f"{metric}{offset}", *by, function="max")


def rate(metric: str, where: str = "", *by: str) -> str:
    """A counter's increase a second, summed over all processes but for ``by``."""
    return total(f"rate({f'{metric}{{{where}}}' if where else metric}[$__rate_interval])", *by)


def total(expr: str, *by: str, function: str = "sum") -> str:
    """The sum of an expression's series but for ``by``, or what another of PromQL's functions makes of them."""
    labels = f" by ({', '.join(by)}) " if by else " "
    return f"{function}{labels}({expr})"


def goodput(where: str, *by: str) -> str:
    """The share of jobs' time that went into new steps; the time in which they waited is left out."""
    kinds = ('kind="productive"', 'kind!="waiting"')
    seconds = (newest("boost_job_goodput_seconds", f"{where}, {kind}", *NAMES, "kind") for kind in kinds)
    return " / ".join(total(expr, *by) for expr in seconds)


def share(part: str, whole: str, *by: str) -> str:
    """``part`` over the ``whole`` that has the same labels ``by``; over the only one without."""
    return f"{part} / on ({', '.join(by)}) group_left () {whole}"


def a_step(metric: str, where: str = JOB, *by: str) -> str:
    """What a counter of ranks grows by in an optimizer step, the mean of the ranks."""
    return share(rate(metric, where, *by), rate("boost_rank_steps_total", JOB))


# Where all panels read from: whichever Prometheus is chosen at the top of the dashboard.

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")


WIDTH = 24  # of Grafana's grid


class Need(StrEnum):
    """What a panel cannot show anything without, said in its place."""

    GPU = "No NVIDIA GPU here"
    DCGM = "No GPU of this job in Prometheus from NVIDIA's DCGM exporter"
    NODE = "No node_exporter in Prometheus"
    KUBERNETES = "Nothing in Prometheus from the kubelet or kube-state-metrics"
    RAY = "Ray's own metrics are not in Prometheus"
    PEAK = "The peak of this device is not known"
    ALERT = "Nothing fires"
    CONTEXT = "Each sequence is on one rank"
    HALF_AN_HOUR = "The job has not run for half an hour yet"


def query(expr: str, legend: str = "") -> prometheus.Dataquery:
    """PromQL, and what its series are called: text with ``{{label}}``."""
    result = prometheus.Dataquery().expr(expr).legend_format(legend).datasource(PROMETHEUS)
    return result.editor_mode(QueryEditorMode.CODE)


# Parts of panels that nothing changes: colours that a series keeps when others come and go, all series at the place of
# the pointer with the largest first, and the newest value.
_BY_NAME = dashboard.FieldColor().mode(schema.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
TOOLTIP = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
_NEWEST = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


# Lines over time.

# Rates over ranks' steps have no value where no step ended; steps may take minutes. In milliseconds.
_GAP = 300_000


class Lines(timeseries.Panel):
    """Lines over time: those of each query that is added, drawn as lines unless set otherwise."""

    def of(self, expr: str, legend: str = "") -> Self:
        """Add a query's series, called by the ``legend``: text with ``{{label}}``."""
        return self.with_target(query(expr, legend))

    def stacked(self) -> Self:
        """Draw areas that add up."""
        return self.fill_opacity(40).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))

    def stepped(self) -> Self:
        """Draw lines of whole numbers that jump."""
        return self.fill_opacity(0).line_width(2).line_interpolation(looks.LineInterpolation.STEP_AFTER)

    def counted(self) -> Self:
        """Draw bars of how many there were between a point and the one before."""
        return self.stacked().draw_style(looks.GraphDrawStyle.BARS)


def plot(title: str, says: str, unit: str = "none", need: Need | None = None, from_zero: bool = True) -> Lines:
    """Lines over time, from zero up, or on an axis that fits them."""
    panel = Lines().title(title).description(says).datasource(PROMETHEUS).unit(unit).height(8).span(8)
    panel = panel.line_width(1).fill_opacity(8).show_points(looks.VisibilityMode.AUTO).span_nulls(_GAP)
    legend = common.VizLegendOptions().show_legend(True).display_mode(looks.LegendDisplayMode.LIST)
    legend = legend.placement(looks.LegendPlacement.BOTTOM)
    panel = panel.color_scheme(_BY_NAME).legend(legend).tooltip(TOOLTIP)
    if from_zero:
        panel = panel.min(0)
    return panel if need is None else panel.no_value(need)


def quantiles(title: str, says: str, histogram: str) -> Lines:
    """What half, nine of ten and 99 of 100 of a histogram's observations do not exceed, in seconds."""
    panel, buckets = plot(title, says, "s"), rate(f"{histogram}_bucket", "", "le")
    for legend, below in {"half": 0.5, "90 %": 0.9, "99 %": 0.99}.items():
        panel.of(f"histogram_quantile({below}, {buckets})", legend)
    return panel


# Tables: a row for each combination of labels, a column for each label and each query.

OF_JOBS = {"job_name": "Job", "tenant": "Tenant", "job_id": "Id"}
# A row's job, with the time that is looked at.
_TO_JOB = "/d/boost-job?var-job_id=${__data.fields.job_id}&var-datasource=${datasource}&${__url_time_range}"


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
    # What Grafana calls the values of the queries.
    fields = ["Value"] if len(columns) == 1 else [f"Value #{letter}" for letter in ascii_uppercase[: len(columns)]]
    for column in columns:
        panel = panel.with_target(query(column.expr).instant().format(PromQueryFormat.TABLE))
    hidden = [field for field, column in zip(fields, columns, strict=True) if not column.heading]
    order = {field: place for place, field in enumerate([*labels, *fields])}
    arranged = {"excludeByName": dict.fromkeys(["Time", *hidden], True), "indexByName": order, "renameByName": {}}
    merge = schema.DataTransformerConfig("merge", options={})
    panel = panel.transformations([merge, schema.DataTransformerConfig("organize", options=arranged)])
    for label, heading in labels.items():
        options = [schema.DynamicConfigValue("displayName", heading)]
        if label == "job_name":
            options.append(schema.DynamicConfigValue("links", [{"title": "Look at this job", "url": _TO_JOB}]))
        panel = panel.override_by_name(label, options)
    for field, column in zip(fields, columns, strict=True):
        shown = {"displayName": column.heading, "unit": column.unit}
        panel = panel.override_by_name(field, [schema.DynamicConfigValue(*option) for option in shown.items()])
    return panel


# Single values in large, and bars.


class Number(stat.Panel):
    """A value in large."""

    def levels(self, lowest: str = "text", **steps: float) -> Self:
        """Set the value's colour: ``lowest`` below all ``steps``, and from each step on the one it is named for."""
        thresholds = [schema.Threshold(None, lowest), *(schema.Threshold(steps[colour], colour) for colour in steps)]
        return self.thresholds(dashboard.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(thresholds))


def number(title: str, says: str, expr: str, unit: str = "none") -> Number:
    """The newest value in large, with its course behind it."""
    panel = Number().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).height(4).span(4).color_mode(looks.BigValueColorMode.VALUE)
    panel = panel.graph_mode(looks.BigValueGraphMode.AREA).reduce_options(_NEWEST)
    return panel.levels().targets([query(expr)])


def count(title: str, says: str, expr: str, unit: str = "none", legend: str = "") -> Number:
    """The value of this moment in large; 0 where there is no series, because nothing is there to be counted."""
    panel = number(title, says, expr, unit).graph_mode(looks.BigValueGraphMode.NONE).no_value("0")
    return panel.targets([query(expr, legend).instant()])


def bars(title: str, says: str, unit: str, expr: str, legend: str) -> bargauge.Panel:
    """A bar for each series, of this moment, the longest first."""
    panel = bargauge.Panel().title(title).description(says).datasource(PROMETHEUS)
    panel = panel.unit(unit).min(0).height(8).span(8).color_scheme(_BY_NAME)
    panel = panel.display_mode(looks.BarGaugeDisplayMode.BASIC).orientation(looks.VizOrientation.HORIZONTAL)
    return panel.reduce_options(_NEWEST).with_target(query(f"sort_desc({expr})", legend).instant())


# What is chosen at the top of a dashboard, and filled into its queries and links.

SERVICE_URL = "http://localhost:8900"  # where people reach the service's page; the chart sets it
GPU_HOUR_PRICE = "gpu_hour_price"

_ALL = schema.VariableOption(selected=True, text=["All"], value=["$__all"])
# Some tenants or all, some jobs by name or all, and one job; several jobs may have one name.
_VARIABLES = {
    "tenant": ("Tenant", "label_values(boost_job_info, tenant)"),
    "job_name": ("Job", 'label_values(boost_job_info{tenant=~"$tenant"}, job_name)'),
    "job_id": ("Job id", 'label_values(boost_job_info{tenant=~"$tenant", job_name=~"$job_name"}, job_id)'),
}


# What all dashboards have in common, and their JSON.

_TAG = "boost"
_REFRESH = "15s"  # as often as the shipped Prometheus scrapes; the chart says how often its Prometheus does


class Row(NamedTuple):
    """Panels under a heading. They fill lines from the left; the next begins where their spans reach the full width.

    Attributes:
        title: The heading.
        panels: The panels.
        span: The width of each; ``None``: its own.
    """

    title: str
    panels: Sequence[Builder[schema.Panel]]
    span: int | None = None


def frame(title: str, says: str, rows: Sequence[Row], variables: Sequence[str] = ()) -> dashboard.Dashboard:
    """A dashboard with its rows and these variables, to which others, marks and links are still to be added."""
    board = dashboard.Dashboard(f"Boost / {title}").uid(f"boost-{title.lower()}").description(says).tags([_TAG])
    board = board.timezone("browser").refresh(_REFRESH).time("now-1h", "now").editable()
    board = board.tooltip(schema.DashboardCursorSync.CROSSHAIR)
    service_url = ConstantVariable("service_url").label("Boost's address").value(SERVICE_URL)
    board = board.variables([DatasourceVariable("datasource").label("Prometheus").type("prometheus"), service_url])
    menu = Link("Dashboards").type(schema.DashboardLinkType.DASHBOARDS).tags([_TAG])
    board = board.link(menu.as_dropdown(True).include_vars(True).keep_time(True))
    for name in variables:
        label, query = _VARIABLES[name]
        variable = QueryVariable(name).label(label).datasource(PROMETHEUS).query(query)
        variable = variable.refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        variable = variable.sort(schema.VariableSort.ALPHABETICAL_ASC)
        if name != "job_id":
            variable = variable.multi(True).include_all(True).all_value(".*").current(_ALL)
        board = board.with_variable(variable)
    for row in rows:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(panel if row.span is None else cast(Any, panel).span(row.span))
    return board


class Encoder(JSONEncoder):
    """The SDK's, but links and the switches of marks stay in sight: it would put all of them into a menu."""

    def default(self, obj: Any) -> Any:
        """What JSON knows no way to write."""
        plain = super().default(obj)
        if isinstance(obj, schema.DashboardLink | schema.AnnotationQuery):
            del plain["placement"]
        return plain


def to_service(path: str = "/") -> Link:
    """A page of the service; ``path`` may name variables."""
    link = Link("Open in Boost").type(schema.DashboardLinkType.LINK).icon("external link")
    return link.url(f"${{service_url}}{path}").target_blank(True)


# Marks in all graphs of a dashboard: when a job was restarted, and when its gang changed its layout.


def restarts(where: str) -> Marks:
    """One mark a restart, with its cause."""
    labels = ("boost_job_restarts_total", where, "job_name", "cause")
    now, before = newest(*labels), newest(*labels, offset=EARLIER)
    # A job's first restart for a cause may make the series: what was not there is taken for 0.
    return marks("Restarts", "semi-dark-red", f"{now} > ({before} or 0 * {now})", "{{job_name}} restarted: {{cause}}")


def marks(name: str, colour: str, expr: str, text: str) -> Marks:
    """A mark wherever an expression has a value, with a text that may name its labels."""
    mark = Marks().name(name).datasource(PROMETHEUS).enable(True).icon_color(colour)
    return mark.expr(expr).step("15s").title_format(text)
