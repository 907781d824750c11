"""Inference with trained models: checkpoints in transformers' classes, generation and evaluation."""
