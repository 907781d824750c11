"""Marks in all graphs of a dashboard: when a job was restarted, and when its gang changed its layout."""

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery

from deploy.grafana.source.panels import PROMETHEUS, earlier, newest

_SHAPE = {
    "boost_job_workers": "workers",
    "boost_job_tensor_parallel_size": "tensor parallel",
    "boost_job_pipeline_parallel_size": "pipeline parallel",
    "boost_job_context_parallel_size": "context parallel",
    "boost_job_data_parallel_size": "data parallel",
}


def restarts(where: str) -> AnnotationQuery:
    """One mark a restart, with its cause."""
    counted = ("boost_job_restarts_total", where, "job_name", "cause")
    now, before = newest(*counted), earlier(*counted)
    # A job's first restart for a cause may make the series: what was not there is taken for 0.
    return _marks("Restarts", "semi-dark-red", f"{now} > ({before} or 0 * {now})", "{{job_name}} restarted: {{cause}}")


def layouts(where: str) -> AnnotationQuery:
    """One mark a change of a job's workers or of an axis of its layout, with the new size."""
    changes = " or ".join(_change(metric, called, where) for metric, called in _SHAPE.items())
    return _marks("Layout", "semi-dark-blue", changes, "{{job_name}}: {{axis}} {{size}}")


def _change(metric: str, called: str, where: str) -> str:
    changed = f"{newest(metric, where, 'job_name')} != {earlier(metric, where, 'job_name')}"
    return f'label_replace(count_values by (job_name) ("size", {changed}), "axis", "{called}", "", "")'


def _marks(name: str, colour: str, expr: str, text: str) -> AnnotationQuery:
    marks = AnnotationQuery().name(name).datasource(PROMETHEUS).enable(True).icon_color(colour)
    return marks.expr(expr).step("15s").title_format(text)
