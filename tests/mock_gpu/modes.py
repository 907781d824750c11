"""Training steps of one rank in many modes: warmed up, captured and replayed. A process on the mock runs it.

Prints a line of JSON for each mode. It takes the names of those to run; without any it runs all.
"""

import gc
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from boost_core.bench.rank import LoneCommunicator, alone, draw_weights
from boost_core.config import JobSpec
from boost_core.data.corpus import Corpus, Sampler, Stream, TokenStream
from boost_core.parallel.communicator import Communicator
from boost_core.plan.report import plan
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from boost_core.train.step_graph import WARM_STEPS
from tests.mock_gpu import control

STEPS = WARM_STEPS + 3

# What each mode changes of two blocks of 7B over four ranks, with two sequences of 2,048 tokens in a micro-batch.
MODES: dict[str, dict[str, dict[str, object]]] = {
    "plain": {},
    "documents apart": {"data": {"documents_apart": True}},
    "window": {"model": {"sliding_window": 512}},
    "grouped queries": {"model": {"num_key_value_heads": 8}},
    "normed queries": {"model": {"qk_norm": True}},
    "recompute full": {"parallelism": {"recompute": "full"}},
    "recompute latent": {"parallelism": {"recompute": "latent"}},
    "recompute shared": {"parallelism": {"recompute": "shared"}},
    "recompute offload": {"parallelism": {"recompute": "offload"}},
    "optimizer offload": {"parallelism": {"optimizer_offload": 0.5}},
    "split, recompute latent": {"parallelism": {"split_micro_batch": True, "recompute": "latent"}},
    "split": {"parallelism": {"split_micro_batch": True}},
    "vanilla": {"parallelism": {"strategy": "vanilla"}},
    "dense": {"model": {"family": "dense", "rank": None}},
    "tied": {"model": {"tie_embeddings": True}},
    "fp32": {"training": {"precision": "fp32"}},
    "fp8, recompute latent": {"training": {"precision": "fp8"}, "parallelism": {"recompute": "latent"}},
    "fp8, split": {"training": {"precision": "fp8"}, "parallelism": {"split_micro_batch": True}},
    "fp8, tied, grouped queries": {
        "training": {"precision": "fp8"},
        "model": {"tie_embeddings": True, "num_key_value_heads": 8},
    },
    "muon": {"optimizer": {"kind": "muon"}},
    "loro": {"model": {"family": "svd"}, "optimizer": {"kind": "loro"}},
    "sync norm": {"parallelism": {"norm": "sync"}},
    "norm as published": {"parallelism": {"norm": "online_paper"}},
}
# The whole model, with sequences of 4,096 tokens.
WHOLE = {f"7b, micro-batch {size}{split}": size for size in (1, 4) for split in ("", ", split")}
# With documents apart the ranks learn in a first step whether the next one's fit into a captured one.
REPLAYS = {name: STEPS - WARM_STEPS - (name == "documents apart") for name in [*MODES, *WHOLE]}
UNCAPTURED = {"recompute offload": "what blocks keep goes to the host's memory and back"}


def job(name: str, tensor: int = 4, data: int = 1) -> JobSpec:
    """Return the job of a mode, on tensor and data parallel ranks."""
    size = WHOLE.get(name, 2)
    change = MODES.get(name, {})
    model = {"preset": "7b", "family": "cola", "vocab_size": 32000}
    if name not in WHOLE:
        model["num_hidden_layers"] = 2
    training = {
        "steps": 100,
        "sequence_length": 4096 if name in WHOLE else 2048,
        "global_batch_size": size * data,
        "micro_batch_size": size,
        "precision": "bf16",
    }
    return JobSpec.model_validate(
        {
            "name": "mock",
            "model": {**model, **change.get("model", {})},
            "parallelism": {
                "tensor_parallel_size": tensor,
                "data_parallel_size": data,
                "split_micro_batch": name in WHOLE and name.endswith("split"),
                **change.get("parallelism", {}),
            },
            "optimizer": change.get("optimizer", {}),
            "training": {**training, **change.get("training", {})},
            "data": change.get("data", {}),
            "resources": {"gpus_per_worker": 1},
        }
    )


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Choose here as on a GPU that computes."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # not modelled; torch prefers it on an H100
    # The trial of adds_products compares numbers, which nothing computes here. A GPU has what it looks for.
    with patch("boost_core.optim.zero.adds_products", lambda device, dtype: dtype in (torch.bfloat16, torch.float16)):
        yield


def train(spec: JobSpec, name: str, communicator: type[Communicator] = Communicator) -> TrainState:
    """Do a job's first steps as one rank of the default group, each marked in the log; return the state after them."""
    length = (spec.training.global_batch_size + 1) * spec.training.sequence_length + 1
    tokens = TokenStream([np.random.default_rng(0).integers(1, 256, length, dtype=np.uint8)])
    sampler = Sampler(Corpus((Stream(tokens, tokens, 1.0),), end_of_document=0), spec.training.sequence_length, seed=0)
    state = TrainState.initial(spec, torch.device("cuda", 0), draw_weights, communicator=communicator)
    for step in range(STEPS):
        control.mark(f"{name}, step {step}")
        training_step(state, sampler)
    return state


def measured(name: str) -> dict[str, object]:
    """Train in a mode and return what was seen: the graph's obstacle, and the most memory of any step in bytes."""
    spec = job(name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with alone(spec.parallelism.tensor_parallel_size):
        state = train(spec, name, LoneCommunicator)
        obstacle = state.graph.obstacle
        state.graph.release("the mode is done")
    return {
        "mode": name,
        "obstacle": obstacle,
        "reserved": torch.cuda.max_memory_reserved(),
        "planned": plan(spec).shapes[0].memory.total,
    }


def main(names: list[str]) -> None:
    with as_on_a_gpu():
        for name in names or [*WHOLE, *MODES]:
            try:
                result = measured(name)
            except Exception:
                result = {"mode": name, "error": traceback.format_exc()}
            gc.collect()
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
