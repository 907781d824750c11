"""Gangs of workers on Ray. Nothing else in the service imports ray."""
