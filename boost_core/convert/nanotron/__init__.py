"""The only place that knows nanotron (0.4, PyPI); nothing else imports it."""
