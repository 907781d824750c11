"""Relations that hold between layouts whatever the bytes are. That these are right is for ``tests/numerics``."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.architecture import cut
from boost_core.config import JobSpec
from boost_core.config.parallelism import Layout, RecomputeMode
from boost_core.plan.machine import machine_for
from boost_core.plan.memory import Memory, rank_memory, state_bytes
from boost_core.plan.report import step_parts
from boost_core.plan.throughput import StepParts
from tests.planning_truth import offload_seconds


def job(precision: str = "bf16", optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> JobSpec:
    model = {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8, "rank": 64,
        "vocab_size": 4096,
    } | sections.get("model", {})  # fmt: skip
    if model.get("family") == "dense":
        del model["rank"]
    training = {
        "steps": 10, "sequence_length": 128, "global_batch_size": 64, "micro_batch_size": 4, "precision": precision,
    } | sections.get("training", {})  # fmt: skip
    return JobSpec.model_validate(
        {
            "name": "planned", "model": model, "training": training, "optimizer": optimizer or {},
            "parallelism": sections.get("parallelism", {}), "data": sections.get("data", {}),
            "resources": {"gpus_per_worker": 1} | sections.get("resources", {}),
        }
    )  # fmt: skip


def memory(spec: JobSpec) -> Memory:
    return rank_memory(spec, Layout.of(spec.parallelism))


MODELS = st.sampled_from(
    [
        {"family": "dense"},
        {"family": "svd"},
        {"family": "cola"},
        {"family": "cola", "tie_embeddings": True, "num_key_value_heads": 8},
        {"family": "lax", "lax": {"gate": "tensor"}},
        {"family": "lax", "lax": {"chain_length": 3}},
    ]
)
LOW_RANK = MODELS.filter(lambda model: model["family"] != "dense")
PRECISIONS = st.sampled_from(["fp32", "bf16"])
SIZES = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(MODELS, PRECISIONS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["none", "full"]))
def test_more_tensor_parallel_ranks_never_need_more(
    model: dict[str, Any], precision: str, size: int, stages: int, recompute: str
) -> None:
    few, many = (
        memory(
            job(
                precision,
                model=model,
                parallelism={
                    "tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "recompute": recompute,
                },
            )
        )
        for ranks in (size, 2 * size)
    )  # fmt: skip
    assert many.weights < few.weights
    assert many.gradients < few.gradients
    assert many.optimizer < few.optimizer
    assert many.activations < few.activations
    assert many.total < few.total


@settings(max_examples=40, deadline=None)
@given(LOW_RANK, PRECISIONS, SIZES, st.integers(0, 1))
def test_what_is_computed_again_is_not_kept(model: dict[str, Any], precision: str, size: int, gpus: int) -> None:
    none, latent, full = (
        memory(
            job(
                precision, model=model, resources={"gpus_per_worker": gpus},
                parallelism={"tensor_parallel_size": size, "recompute": recompute},
            )
        )
        for recompute in ("none", "latent", "full")
    )  # fmt: skip
    assert full.activations <= latent.activations <= none.activations
    assert full.total <= latent.total <= none.total


@settings(max_examples=40, deadline=None)
@given(MODELS, PRECISIONS, st.sampled_from([2, 4, 8]))
def test_zero_shares_the_optimizers_state_among_replicas(model: dict[str, Any], precision: str, replicas: int) -> None:
    whole, shared = (
        memory(job(precision, model=model, parallelism={"data_parallel_size": replicas, "zero_stage": stage}))
        for stage in (0, 1)
    )
    assert shared.weights == pytest.approx(whole.weights, rel=1e-2)  # but for padding
    # Masters and moments are 12 bytes and each replica has its share; in bf16 also of the rounded weights.
    expected = whole.weights / (2 if precision == "bf16" else 4) * (14 if precision == "bf16" else 12) / replicas
    assert shared.optimizer == pytest.approx(expected, rel=1e-2)
    if precision == "bf16" and replicas > 2:
        assert shared.total < whole.total


@settings(max_examples=40, deadline=None)
@given(MODELS, PRECISIONS, st.integers(0, 1), st.integers(1, 8), st.sampled_from([32, 128, 512]))
def test_activations_grow_with_the_micro_batch_and_the_sequence(
    model: dict[str, Any], precision: str, gpus: int, sequences: int, length: int
) -> None:
    def at(micro_batch: int, length: int) -> Memory:
        training = {"micro_batch_size": micro_batch, "global_batch_size": 2 * 8 * 9 * 5 * 7, "sequence_length": length}
        return memory(job(precision, model=model, training=training, resources={"gpus_per_worker": gpus}))

    base = at(sequences, length)
    # Sizes that divide the batch, whatever was drawn.
    for other in (at(2 * sequences, length), at(sequences, 2 * length)):
        assert other.activations > base.activations
        assert other.total > base.total
        assert (other.weights, other.gradients, other.optimizer) == (base.weights, base.gradients, base.optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("model", [{"family": "cola"}, {"family": "lax", "lax": {"chain_length": 3}}], ids=str)
def test_the_rank_that_needs_most_is_among_those_that_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], schedule: str
) -> None:
    def listed(layers: int, stages: int) -> list[int]:
        """Some cut or other."""
        ends = sorted(Random(layers).sample(range(1, layers), stages - 1))
        return [end - begin for begin, end in pairwise((0, *ends, layers))]

    jobs = [
        job(
            model=model | {"num_hidden_layers": layers},
            parallelism={
                "pipeline_parallel_size": size, "pipeline_schedule": schedule, "recompute": recompute,
                "pipeline_layers_per_stage": listed(layers, size * (1 if schedule == "1f1b" else 2)) if own else None,
            },
            training={"micro_batch_size": 1, "global_batch_size": 48},
        )
        for layers, size in ((8, 4), (13, 4), (24, 8), (17, 3))
        for recompute, own in (("none", False), ("full", False), ("none", True))
    ]  # fmt: skip
    looked_at = [memory(spec) for spec in jobs]
    monkeypatch.setattr("boost_core.plan.memory._extremes", lambda _model, _stages, pipeline: range(pipeline))
    assert [each.total for each in looked_at] == [memory(spec).total for spec in jobs]


def test_micro_batches_of_a_pipeline_share_what_they_are_received_into() -> None:
    few, many = (
        memory(
            job(
                parallelism={"pipeline_parallel_size": 2},
                training={"micro_batch_size": 1, "global_batch_size": size},
            )
        ).activations
        for size in (8, 16)
    )  # fmt: skip
    # Only the batch grows: by 32 bytes a token, and 8 of the token after each sequence.
    assert many - few == 8 * (128 * 32 + 8)


def test_documents_apart_cost_nothing_where_attention_takes_them_in_one() -> None:
    def apart_costs(precision: str, gpus: int, **model: Any) -> int:
        together, apart = (
            memory(job(precision, data={"documents_apart": choice}, model=model, resources={"gpus_per_worker": gpus}))
            for choice in (False, True)
        )
        return apart.activations - together.activations

    assert apart_costs("bf16", 1) == apart_costs("bf16", 1, sliding_window=16) == 0
    # Each by itself, what attention gives is there twice in each block: 256 elements a token, of 4 sequences of 128.
    assert apart_costs("bf16", 0) == 8 * 4 * 128 * 256 * 2
    assert apart_costs("fp32", 1) == 8 * 4 * 128 * 256 * 4


def test_loros_factors_are_whole_on_each_replica() -> None:
    parallelism = {"data_parallel_size": 4}
    adamw, loro = (
        memory(job(model={"family": "svd"}, optimizer={"kind": kind}, parallelism=parallelism))
        for kind in ("adamw", "loro")
    )
    assert loro.optimizer > 2 * adamw.optimizer


@pytest.mark.parametrize(("precision", "bytes_a_parameter"), [("fp32", 16), ("bf16", 18)])
def test_a_parameter_costs_what_mixed_precision_costs(precision: str, bytes_a_parameter: int) -> None:
    """18 bytes with fp32 masters, moments and gradients beside rounded weights; 16 without those."""
    planned = memory(job(precision, model={"family": "dense"}))
    held = planned.weights + planned.gradients + planned.optimizer
    parameters = 8 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256) + 2 * 4096 * 256 + 256
    assert held == bytes_a_parameter * parameters


def test_the_state_of_all_stages_is_that_of_the_model() -> None:
    spec = job(model={"family": "cola"}, parallelism={"pipeline_parallel_size": 4})
    stages = cut(spec.model, spec.parallelism, 128)
    sizes = [
        [group.weights + group.gradients + group.optimizer for group in state_bytes(spec, of, 2)]
        for of in (stages, *(stages[rank::4] for rank in range(4)))
    ]
    assert sum(map(sum, sizes[1:])) == sum(sizes[0])


@settings(max_examples=20, deadline=None)
@given(LOW_RANK, PRECISIONS, st.sampled_from([1, 2, 4]))
def test_more_blocks_that_the_host_has_take_nothing_of_the_device(
    model: dict[str, Any], precision: str, size: int
) -> None:
    few, many, shared = (
        memory(
            job(
                precision, model=model | {"num_hidden_layers": layers},
                parallelism={"tensor_parallel_size": size, "recompute": recompute},
            )
        )
        for layers, recompute in ((8, "offload"), (17, "offload"), (8, "shared"))
    )  # fmt: skip
    assert many.activations == few.activations < shared.activations
    assert many.host > 2 * few.host > 2 * shared.host == 0


@pytest.mark.parametrize(("size", "alone"), [(1, "latent"), (4, "shared")])
def test_copies_take_what_passes_do_not_hide(size: int, alone: RecomputeMode) -> None:
    def parts(recompute: str, host_bandwidth: float) -> tuple[StepParts, float]:
        spec = job(
            model={"family": "cola"}, parallelism={"tensor_parallel_size": size, "recompute": recompute},
            resources={"accelerator_type": "A100"}, training={"cuda_graphs": "off"},
        )  # fmt: skip
        machine = machine_for(spec.resources, "bf16")
        machine = replace(machine, profile=replace(machine.profile, host_bandwidth=host_bandwidth, block_seconds=0.0))
        layout = Layout.of(spec.parallelism)
        return step_parts(spec, layout, machine), offload_seconds(spec, layout, machine)

    hidden, nothing = parts("offload", 1e15)
    assert nothing == 0
    assert hidden == parts(alone, 1e15)[0]
    (slow, copied), (slower, twice) = parts("offload", 1e9), parts("offload", 5e8)
    assert slow.arithmetic - hidden.arithmetic == pytest.approx(copied)
    # Of what takes twice as long no more is hidden, and all of it crosses the link twice, in 16 micro-batches.
    host = memory(
        job(model={"family": "cola"}, parallelism={"tensor_parallel_size": size, "recompute": "offload"})
    ).host
    assert twice - copied == pytest.approx(16 * 2 * host / 1e9)
    assert slower.total > slow.total > hidden.total
