"""What is chosen at the top of a dashboard, and filled into its queries and links."""

from grafana_foundation_sdk.builders.dashboard import (
    ConstantVariable,
    DatasourceVariable,
    QueryVariable,
    TextBoxVariable,
)
from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

from deploy.grafana.source.datasource import PROMETHEUS

SERVICE_URL = "http://localhost:8900"
GPU_HOUR_PRICE = "gpu_hour_price"

_ALL = VariableOption(selected=True, text=["All"], value=["$__all"])


def datasource() -> DatasourceVariable:
    """Which Prometheus."""
    return DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def service_url() -> ConstantVariable:
    """Where people reach the service's page; the chart sets it."""
    return ConstantVariable("service_url").label("Boost's address").value(SERVICE_URL)


def gpu_hour_price() -> TextBoxVariable:
    """What a GPU costs in an hour, in whichever currency; the chart sets it."""
    return TextBoxVariable(GPU_HOUR_PRICE).label("Price of a GPU-hour").default_value("0")


def instances() -> TextBoxVariable:
    """Some machines or all, as Prometheus calls node_exporter's targets."""
    return TextBoxVariable("instance").label("Nodes (regular expression)").default_value(".*")


def tenants() -> QueryVariable:
    """Some tenants or all."""
    return _several("tenant", "Tenant", "label_values(boost_job_info, tenant)")


def job_names() -> QueryVariable:
    """Some jobs by name or all; several jobs may have one name."""
    return _several("job_name", "Job", 'label_values(boost_job_info{tenant=~"$tenant"}, job_name)')


def job_id() -> QueryVariable:
    """One job."""
    jobs = 'boost_job_info{tenant=~"$tenant", job_name=~"$job_name"}'
    return _query("job_id", "Job id", f"label_values({jobs}, job_id)")


def _several(name: str, label: str, query: str) -> QueryVariable:
    return _query(name, label, query).multi(True).include_all(True).all_value(".*").current(_ALL)


def _query(name: str, label: str, query: str) -> QueryVariable:
    variable = QueryVariable(name).label(label).datasource(PROMETHEUS).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
