"""What the time that is looked at has cost: GPU-hours, and their price."""

from grafana_foundation_sdk.builders import bargauge

from deploy.grafana.source.frame import Row
from deploy.grafana.source.numbers import bars
from deploy.grafana.source.panels import Query
from deploy.grafana.source.promql import TENANTS, newest


def row() -> Row:
    """By tenant and by queue."""
    return Row("Use", [panel.span(6) for of in ("tenant", "queue") for panel in (_hours(of), _cost(of))])


def _gpu_hours(of: str) -> str:
    held = newest(f"boost_{of}_gpus_held", TENANTS if of == "tenant" else "", of)
    return f"sum_over_time({held}[$__range:1m]) / 60"  # a value a minute, and none where nobody looked


def _hours(of: str) -> bargauge.Panel:
    says = f"GPU-hours that the gangs of each {of} have held within the selected time range."
    return bars(f"GPU-hours by {of}", says, "suffix: h", Query(f"sort_desc({_gpu_hours(of)})", f"{{{{{of}}}}}"))


def _cost(of: str) -> bargauge.Panel:
    says = f"Their cost at the price of a GPU-hour set at the top, in its currency, for each {of}."
    cost = f"sort_desc({_gpu_hours(of)} * $gpu_hour_price)"
    return bars(f"Cost by {of}", says, "none", Query(cost, f"{{{{{of}}}}}")).decimals(2)
