"""How the service is run: metrics' rules, dashboards, manifests. Not part of the installed package."""
