"""Where all panels read from: whichever Prometheus is chosen at the top of the dashboard."""

from grafana_foundation_sdk.models.common import DataSourceRef

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
