"""Sends jobs' curves and states on to TensorBoard and MLflow, from the record, so that no step waits for it."""
