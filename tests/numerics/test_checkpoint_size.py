"""The planned size of a checkpoint against the tensors that ranks write."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from boost_core.bench.rank import alone
from boost_core.plan.run_cost import checkpoint_bytes
from boost_core.train.state import TrainState
from tests.jobs import tiny_job


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"family": "dense", "rank": None}},
        {"model": {"family": "lax"}, "training": {"precision": "bf16"}},
        {"model": {"family": "svd"}, "optimizer": {"kind": "loro"}},
        {"optimizer": {"kind": "muon"}},
        {"model": {"tie_embeddings": True}},
    ],
)
def test_a_checkpoint_has_the_planned_bytes(sections: dict[str, Any], tmp_path: Path) -> None:
    job = tiny_job(tmp_path, tmp_path / "checkpoints", parallelism={"tensor_parallel_size": 1}, **sections)
    with alone(1):
        chunks = TrainState.initial(job, torch.device("cpu")).chunks()
    assert sum(prod(chunk.shape) * chunk.tensor.element_size() for chunk in chunks) == checkpoint_bytes(job)
