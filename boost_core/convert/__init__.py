"""Whole models in and out of the trainer: safetensors with published names, and a dense model cut to low rank.

::

    python -m boost_core.convert export CHECKPOINTS MODEL            the newest checkpoint as a model
    python -m boost_core.convert start MODEL JOB.yaml CHECKPOINTS    a model as what a job starts from

``modeling_boost.py`` is the class of exported models: transformers runs the copy beside the model, nothing here does.
"""
