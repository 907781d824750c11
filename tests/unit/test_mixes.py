"""Mixes of memory modes: held to all that there are, and to what must hold whatever the memory is."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.config import JobSpec, Layout
from boost_core.config.parallelism import StageModes
from boost_core.plan.machine import machine_for
from boost_core.plan.memory import rank_memory
from boost_core.plan.mixes import Mixes
from boost_core.plan.stages import cut
from boost_core.plan.throughput import step_seconds

MODES = ("none", "latent", "shared", "full")


@cache
def job(family: str, layers: int, tensor: int, pipeline: int, schedule: str = "1f1b") -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "mixed",
            "model": {"preset": "7b", "vocab_size": 32_000, "family": family, "num_hidden_layers": layers},
            "parallelism": {
                "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "pipeline_schedule": schedule,
            },
            "training": {
                "steps": 1, "sequence_length": 4096, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16",
            },
            "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
        }
    )  # fmt: skip


def needed(spec: JobSpec) -> int:
    return rank_memory(spec, Layout.of(spec.parallelism)).total


def seconds(spec: JobSpec) -> float:
    return step_seconds(spec, Layout.of(spec.parallelism))


@cache
def bounds(spec: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes with the mode that keeps least, and with the one that keeps most."""
    own = job(*spec)
    return needed(own.with_parallelism(recompute="full")), needed(own.with_parallelism(recompute="none"))


def mixed(spec: tuple[Any, ...], share: float) -> tuple[JobSpec, float]:
    """The least costly mix within so much of what lies between the least and the most, and that limit."""
    least, most = bounds(spec)
    limit = least + share * (most - least)
    own = job(*spec)
    machine = machine_for(own.resources, own.training.precision)
    return Mixes(own, Layout.of(own.parallelism), machine).least_costly(limit), limit


def every_mix(spec: JobSpec) -> Iterator[tuple[float, int]]:
    sizes = [len(stage.layers) for stage in cut(spec.model, spec.parallelism, spec.training.sequence_length)]
    each = [
        [StageModes(**dict(zip(MODES, counts, strict=True))) for counts in product(range(size + 1), repeat=4)
         if sum(counts) == size and (spec.parallelism.tensor_parallel_size > 1 or not counts[2])]
        for size in sizes
    ]  # fmt: skip
    for stages in product(*each):
        way = spec.with_parallelism(recompute=stages)
        yield seconds(way), needed(way)


@pytest.mark.parametrize("spec", [("cola", 5, 4, 1), ("cola", 6, 1, 2), ("lax", 4, 2, 2)], ids=str)
def test_no_mix_that_fits_is_much_faster(spec: tuple[Any, ...]) -> None:
    every = list(every_mix(job(*spec)))
    for share in (0.05, 0.15, 0.3, 0.5, 0.7, 0.9):
        found, limit = mixed(spec, share)
        assert needed(found) <= limit
        assert seconds(found) <= 1.01 * min(taken for taken, fits in every if fits <= limit)


SPECS = st.sampled_from(
    [
        ("cola", 24, 4, 1), ("cola", 24, 1, 1), ("lax", 24, 2, 2), ("svd", 24, 4, 4),
        ("cola", 24, 2, 2, "interleaved_1f1b"), ("cola", 24, 4, 2, "zero_bubble"), ("dense", 24, 2, 2),
    ]
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(SPECS, st.floats(0, 1), st.floats(0, 1))
def test_more_memory_never_gives_a_slower_mix(spec: tuple[Any, ...], share: float, other: float) -> None:
    (tight, limit), (wide, _) = (mixed(spec, each) for each in sorted((share, other)))
    assert seconds(wide) <= seconds(tight) * (1 + 1e-9)
    assert needed(tight) <= limit * (1 + 1e-9)


def test_the_first_stage_computes_more_again_as_it_has_more_in_hand() -> None:
    found, _ = mixed(("cola", 24, 4, 4), 0.4)
    stages = found.parallelism.recompute
    assert isinstance(stages, tuple)
    kept = [stage.none for stage in stages[:-1]]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
