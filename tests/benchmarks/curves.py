"""Losses of a tiny job of each family under every layout and recompute mode, to compare two trees bit for bit.

Run ``python -m tests.benchmarks.curves > curves.json`` in either tree, and compare the files with ``cmp``. With
``'lax tp=2 *'`` as an argument, only the cells of such names run. Every cell is a gang of local processes. Activations
and gradients are in float64; masters and moments stay in fp32, and ``state`` is a digest of these after the last step.
A cell that the configuration refuses has the reason instead.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from pydantic import ValidationError

from boost_core.config import JobSpec, RecomputeMode
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.distributed.whole import whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

STEPS, LENGTH = 30, 64
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense", "rank": None},
    "svd": {"family": "svd"},
    "cola": {"family": "cola", "num_key_value_heads": 2},
    "lax": {"family": "lax", "lax": {"gate": "tensor"}},
}
SIZES = (1, 2)
Curve = dict[str, object]


def cells() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, family and parallelism of each cell."""
    for family, tp, pp, cp, mode in itertools.product(FAMILIES, SIZES, SIZES, SIZES, get_args(RecomputeMode)):
        parallelism = {
            "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp, "recompute": mode,
        }  # fmt: skip
        yield f"{family} tp={tp} pp={pp} cp={cp} {mode}", family, parallelism


def job(corpus: Path, family: str, parallelism: dict[str, Any]) -> JobSpec:
    """Return a cell's job.

    Raises:
        ValidationError: The layout is not legal for the family.
    """
    training = {"steps": STEPS, "sequence_length": LENGTH, "global_batch_size": 2, "micro_batch_size": 1}
    return tiny_job(corpus, "unused", model=FAMILIES[family], parallelism=parallelism, training=training)


def trained(spec: JobSpec) -> Curve:
    """Train as one rank of a gang; return the loss of each step, and a digest of the whole state after the last."""
    with patch.dict(COMPUTE_TYPES, {spec.training.precision: torch.float64}):
        state = TrainState.initial(spec, torch.device("cpu"))
        sampler, losses = Sampler(load_corpus(spec.data, LENGTH), LENGTH, spec.training.seed), list[float]()
        while state.step < STEPS:
            losses.append(training_step(state, sampler).loss)
        digest = hashlib.sha256()
        for name, tensor in sorted(whole_tensors(state).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return {"losses": losses, "state": digest.hexdigest()}


def curves(ranks: Ranks, corpus: Path, pattern: str) -> dict[str, Curve]:
    """Train the cells whose names match a pattern."""
    results: dict[str, Curve] = {}
    for name, family, parallelism in cells():
        if not fnmatch(name, pattern):
            continue
        sys.stderr.write(f"{name}\n")
        try:
            spec = job(corpus, family, parallelism)
        except ValidationError as error:
            results[name] = {"refused": "; ".join(each["msg"] for each in error.errors())}
        else:
            results[name], *_ = ranks.run(spec.parallelism.world_size, trained, spec)
    return results


def main() -> None:
    """Print the curves as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.curves", description=__doc__)
    parser.add_argument("cells", nargs="?", default="*", help="names to run, as a pattern of shells (default: all)")
    pattern, ranks = parser.parse_args().cells, Ranks()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = curves(ranks, write_corpus(Path(folder) / "corpus", lines=100), pattern)
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
