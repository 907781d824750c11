"""The model card of an exported model: a README.md in the format that hubs display."""

from collections.abc import Mapping

import yaml

from boost_core.architecture.families import is_dense
from boost_core.checkpoint.manifest import Manifest
from boost_core.config import Layout, ModelConfig
from boost_core.plan.parameters import parameter_count

Losses = Mapping[str, float]  # nats per token, by kind: training, validation

# Sections of the job that determined the model; those about where things are stored are left out.
_SECTIONS = ("model", "data", "training", "optimizer", "parallelism")


def model_card(manifest: Manifest, model: ModelConfig, merged: bool, losses: Losses, scores: Mapping[str, str]) -> str:
    """The card's content.

    Args:
        manifest: The checkpoint's manifest.
        model: The model that was trained.
        merged: Whether the low-rank products were multiplied out.
        losses: The last losses reported by the job; empty if only the checkpoint is known.
        scores: Its scores on tasks, as text by task and metric.
    """
    about = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["boost", model.family]}
    rank = "" if model.rank is None else f" with bottlenecks of rank {model.rank}{', multiplied out' if merged else ''}"
    tokens = manifest.samples * manifest.sequence_length
    facts = {
        "checkpoint": f"step {manifest.step}, {manifest.saved_at:%Y-%m-%d %H:%M} UTC",
        "trained on": f"{tokens:,} tokens, in sequences of {manifest.sequence_length:,}",
        **{f"{part} loss": f"{loss:.4f} nats a token" for part, loss in losses.items()},
        **scores,
        "layout": str(Layout.of(manifest.parallelism)),
        "written by": ", ".join(f"{package} {version}" for package, version in manifest.versions.items()),
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    job = {section: manifest.job[section] for section in _SECTIONS if section in manifest.job}
    return f"""---
{yaml.safe_dump(about, sort_keys=False)}---

# {manifest.job.get("name", "model")}

A {model.family} decoder of {parameter_count(model):,} parameters{rank}, trained by BOOST Service.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH"{_trust(model, merged)})
tokenizer = AutoTokenizer.from_pretrained("PATH"{_trust(model, merged)})
```

The job:

```yaml
{yaml.safe_dump(job, sort_keys=False)}```
"""


def _trust(model: ModelConfig, merged: bool) -> str:
    return "" if merged or is_dense(model) else ", trust_remote_code=True"
