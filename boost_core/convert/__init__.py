"""Import and export of whole models: safetensors with published names, and dense models factored to low rank.

::

    python -m boost_core.convert export CHECKPOINTS MODEL            the newest checkpoint as a model
    python -m boost_core.convert start MODEL JOB.yaml CHECKPOINTS    a model as a checkpoint to start a job from

``modeling_boost.py`` is the class of exported models: transformers runs the copy beside an exported model.
"""
