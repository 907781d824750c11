"""Gangs on Ray: supervisors, replicas and the executor of a controller's decisions."""
