"""Ways from one dashboard to another, and to the service's own page of a job."""

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

TAG = "boost"

# A row's job, with the time that is looked at.
TO_JOB = "/d/boost-job?var-job_id=${__data.fields.job_id}&var-datasource=${datasource}&${__url_time_range}"


def to_all() -> DashboardLink:
    """A menu of this project's dashboards."""
    link = DashboardLink("Dashboards").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def to_service(path: str = "/") -> DashboardLink:
    """A page of the service; ``path`` may name variables."""
    link = DashboardLink("Open in Boost").type(DashboardLinkType.LINK).icon("external link")
    return link.url(f"${{service_url}}{path}").target_blank(True)


def to_dashboard(title: str, uid: str) -> DashboardLink:
    """Another dashboard of the same job and time."""
    link = DashboardLink(title).type(DashboardLinkType.LINK).icon("dashboard").url(f"/d/{uid}")
    return link.include_vars(True).keep_time(True)
