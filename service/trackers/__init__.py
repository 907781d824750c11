"""Sends jobs' curves and states to TensorBoard, MLflow and Weights & Biases, from the record, so that no step waits."""
