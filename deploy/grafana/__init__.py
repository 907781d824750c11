"""Grafana: the dashboards' source, what is built from it, and provisioning for a Grafana of one's own."""
