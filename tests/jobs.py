"""Job specs for tests: small enough for two CPU cores."""

from pathlib import Path
from typing import Any

from boost_core.config import JobSpec

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n"


def write_corpus(folder: Path, files: int = 6, lines: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        (folder / f"{index}.txt").write_text(f"{index} " + TEXT * lines)
    return folder


def tiny_job(corpus: Path, checkpoints: str | Path, **changes: Any) -> JobSpec:
    """A job of a second or two; ``changes`` replace whole sections by name, merged one level deep."""
    job: dict[str, Any] = {
        "name": "tiny-test",
        "model": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 8,
        },
        "parallelism": {"tensor_parallel_size": 2},
        "data": {"source": {"kind": "text", "paths": [str(corpus)]}},
        "training": {
            "steps": 8, "sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 2,
            "evaluate_every_steps": 4, "evaluate_sequences": 6,
        },
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "checkpoint": {"url": str(checkpoints), "every_steps": 3},
    }  # fmt: skip
    for section, change in changes.items():
        job[section] = job[section] | change if isinstance(job.get(section), dict) else change
    return JobSpec.model_validate(job)
