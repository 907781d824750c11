"""The plan's bytes are those of what the trainer really holds.

One rank of the trainer runs among ranks that are not there. Triton's kernels are not launched: they write into memory
that torch has given them and ask for none themselves.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import KernelInterface

from boost_core.architecture import block_modes, cut
from boost_core.bench.rank import draw_weights
from boost_core.config import JobSpec, ParallelismConfig
from boost_core.config.parallelism import Layout, RecomputeMode, chunk_tokens
from boost_core.context.selection import ContextPlanner, attention_layer
from boost_core.kernels import fp8_product
from boost_core.kernels.launch import Implementation, always
from boost_core.optim import zero
from boost_core.optim.zero import host_zeros
from boost_core.parallel import activation_offload
from boost_core.parallel.activation_offload import host_bytes
from boost_core.plan.memory import (
    Activations,
    PipelineRank,
    largest_weight,
    moved_tokens,
    pipeline_ranks,
    rank_memory,
    starting_peak,
    state_bytes,
)
from boost_core.plan.replay import in_hand
from boost_core.train.batch import Batch
from boost_core.train.state import TrainState
from boost_core.train.step import losses, training_step
from tests.numerics.allocator import allocated
from tests.numerics.lengths_on_device import lengths_on_device
from tests.numerics.storages import Made
from tests.ranks import Ranks

LENGTH = 32
CPU = torch.device("cpu")
ELEMENTS = {"fp32": 4, "bf16": 2, "fp8": 2}


def job(model: dict[str, Any], parallelism: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    shape = {
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "rank": 24,
        "vocab_size": 512,
    }  # fmt: skip
    if model["family"] == "dense":
        del shape["rank"]
    training = {"steps": 10, "sequence_length": LENGTH, "global_batch_size": 4, "micro_batch_size": 4}
    return JobSpec.model_validate(
        {"name": "measured", "model": shape | model, "parallelism": parallelism or {}}
        | changes
        | {"training": training | changes.get("training", {})}
    )


@contextmanager
def one_rank(spec: JobSpec, kernels: Implementation) -> Iterator[None]:
    """Rank 0 of the job's gang, whose kernels of Triton's do nothing."""
    dist.init_process_group("fake", rank=0, world_size=spec.parallelism.world_size, store=FakeStore())
    try:
        with (
            lengths_on_device() if kernels == "triton" else nullcontext(),
            always(kernels),
            patch.object(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None),
            patch.object(fp8_product, "unavailable", lambda _: None),
            patch.object(zero, "host_zeros", zeros_apart),
            patch.object(activation_offload, "host_bytes", bytes_apart),
        ):
            yield
    finally:
        dist.destroy_process_group()


OF_HOST = set[StorageWeakRef]()
BUFFERS: list[int] = []  # of the host, for what blocks keep


def zeros_apart(*arguments: Any) -> list[torch.Tensor]:
    """As ``host_zeros``; what the host has on a GPU is left out where memory is counted as a device's."""
    with _disable_current_modes():
        tensors = host_zeros(*arguments)
    OF_HOST.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
    return tensors


def bytes_apart(*arguments: Any) -> torch.Tensor:
    """As ``host_bytes``, left out in the same way."""
    with _disable_current_modes():
        memory = host_bytes(*arguments)
    OF_HOST.add(StorageWeakRef(memory.untyped_storage()))
    BUFFERS.append(memory.nbytes)
    return memory


class Live(Made):
    """As ``Made``, and the most that has been alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        before = len(self.sizes)
        result = super().__torch_dispatch__(function, types, arguments, keywords)
        for storage in self.sizes.keys() & OF_HOST:
            del self.sizes[storage]
        if len(self.sizes) > before:
            self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
            self.peak = max(self.peak, sum(self.sizes.values()))
        return result


class RandomTokens:
    """A sampler."""

    def __init__(self, spec: JobSpec) -> None:
        training, replicas = spec.training, spec.parallelism.data_parallel_size
        self._shape = (training.global_batch_size // replicas, training.sequence_length + 1)

    def sequences(self, *_: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 256, self._shape)


def bytes_of(*tensors: torch.Tensor | None) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each is not None}
    return sum(storage.nbytes() for storage in storages.values())


STATES = [
    (model, parallelism, changes)
    for model, parallelism, changes in (
        ({"family": "cola"}, {}, {}),
        ({"family": "cola", "num_key_value_heads": 2}, {"tensor_parallel_size": 2}, {}),
        ({"family": "svd", "tie_embeddings": True}, {"tensor_parallel_size": 2, "strategy": "vanilla"}, {}),
        ({"family": "dense"}, {"tensor_parallel_size": 4}, {}),
        ({"family": "lax", "lax": {"gate": "tensor"}}, {"data_parallel_size": 2}, {}),
        ({"family": "lax", "lax": {"chain_length": 2}}, {"zero_stage": 0, "data_parallel_size": 2}, {}),
        ({"family": "lax", "lax": {"gate": "dense"}}, {"tensor_parallel_size": 2}, {}),
        ({"family": "cola"}, {"data_parallel_size": 4}, {"optimizer": {"weight_decay": 0.0}}),
        ({"family": "cola"}, {"data_parallel_size": 2, "context_parallel_size": 2}, {}),
        ({"family": "svd"}, {"data_parallel_size": 2}, {"optimizer": {"kind": "loro"}}),
        ({"family": "cola"}, {"data_parallel_size": 2, "tensor_parallel_size": 2}, {"optimizer": {"kind": "muon"}}),
        ({"family": "cola", "tie_embeddings": True}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        ({"family": "cola"}, {"data_parallel_size": 2, "optimizer_offload": 0.4}, {}),
        ({"family": "cola"}, {"optimizer_offload": 1.0}, {}),
        ({"family": "svd"}, {"data_parallel_size": 2, "optimizer_offload": 0.7}, {"optimizer": {"kind": "loro"}}),
        ({"family": "cola"}, {"tensor_parallel_size": 2, "optimizer_offload": 1.0}, {"optimizer": {"kind": "muon"}}),
    )
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "parallelism", "changes"), STATES, ids=map(str, STATES))
def test_weights_gradients_and_optimizer_are_counted_to_the_byte(
    model: dict[str, Any], parallelism: dict[str, Any], changes: dict[str, Any], precision: str
) -> None:
    spec = job(model, parallelism, training={"precision": precision, "micro_batch_size": 1}, **changes)
    with one_rank(spec, "naive"), Live() as live:
        state = TrainState.initial(spec, CPU, draw_weights)
    stages = cut(spec.model, spec.parallelism, LENGTH)[:: spec.parallelism.pipeline_parallel_size]
    planned = state_bytes(spec, stages, ELEMENTS[precision])
    for group, expected in zip(state.optimizer.groups, planned, strict=True):
        named = dict(state.model.named_parameters())
        weights = [named[name].data for name in group.names]
        kept = [group.master, group.first_moment, group.second_moment, group.own_weight]
        gradients = [group.own_gradient, group._gradient]
        assert bytes_of(*weights) == expected.weights
        assert bytes_of(*weights, *kept) == expected.weights + expected.optimizer
        assert bytes_of(*gradients) == expected.gradients
        assert bytes_of(*group.tier.values()) == expected.host
    # The rest are the rotary embedding's angles, and one shard as it is drawn, which is let go.
    spare = 24 * LENGTH * spec.model.head_size // 2 + 4 * spec.model.vocab_size * spec.model.hidden_size
    assert starting_peak(planned) <= live.peak <= starting_peak(planned) + spare


def after_a_step(spec: JobSpec) -> tuple[int, int, int]:
    """Bytes that live on on the device once a state has been trained; and on the host, and elements that are there."""
    with one_rank(spec, "naive"), Live() as live:
        state = TrainState.initial(spec, CPU, draw_weights)
        training_step(state, RandomTokens(spec))
    tiers = [group.tier for group in state.optimizer.groups if group.tier]
    away = [tensor for tier in tiers for tensor in tier.values()]
    return live.alive_bytes(), bytes_of(*away), sum(next(iter(tier.values())).numel() for tier in tiers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "parallelism", "changes"),
    [
        ({"family": "cola"}, {"data_parallel_size": 2, "zero_stage": 1}, {}),
        ({"family": "cola"}, {"data_parallel_size": 2, "zero_stage": 2}, {}),
        ({"family": "svd"}, {"zero_stage": 0, "data_parallel_size": 2}, {"optimizer": {"kind": "loro"}}),
    ],
    ids=str,
)
def test_the_device_is_spared_twelve_bytes_a_weight_that_the_host_has(
    model: dict[str, Any], parallelism: dict[str, Any], changes: dict[str, Any]
) -> None:
    training = {"precision": "bf16", "micro_batch_size": 1}
    there, none, _ = after_a_step(job(model, parallelism, training=training, **changes))
    spec = job(model, parallelism | {"optimizer_offload": 0.7}, training=training, **changes)
    left, host, weights = after_a_step(spec)
    buffers = max(group.staged for group in state_bytes(spec, cut(spec.model, spec.parallelism, LENGTH), 2))
    assert none == 0 < weights
    assert host == 12 * weights == rank_memory(spec, Layout.of(spec.parallelism)).host
    assert there - left == 12 * weights - buffers


def kept(spec: JobSpec, kernels: Implementation) -> int:
    """Bytes that live on after a micro-batch's forward pass because of it, the losses left out."""
    with one_rank(spec, kernels):
        state = TrainState.initial(spec, CPU, draw_weights)
        state.partitioner.rotation.angles(torch.float32)
        token_T = torch.zeros(spec.training.micro_batch_size * LENGTH, dtype=torch.int64)
        loss_T, left, _ = allocated(lambda: state.model(token_T, token_T, state.partitioner.rotation))
        return left - bytes_of(loss_T)


FP8_MODEL = {"family": "cola", "rank": 32, "intermediate_size": 192}  # multiples of 16
COLA, LAX = {"family": "cola"}, {"family": "lax", "lax": {"gate": "tensor", "base": "svd"}}
KEPT = [
    (kernels, precision, model, {"tensor_parallel_size": size, **choice})
    for size, kernels, precision, model, choice in (
        (1, "triton", "bf16", COLA, {}),
        (2, "triton", "bf16", COLA, {}),
        (2, "triton", "fp32", COLA | {"num_key_value_heads": 2}, {"group_projections": False}),
        (2, "triton", "bf16", COLA, {"recompute": "latent"}),
        (1, "triton", "bf16", COLA, {"recompute": "latent"}),
        (2, "triton", "bf16", COLA, {"recompute": "shared"}),
        (2, "triton", "bf16", COLA, {"recompute": "full"}),
        (2, "triton", "bf16", COLA, {"norm": "online_paper"}),
        (2, "triton", "bf16", COLA, {"norm": "online_paper", "recompute": "shared"}),
        (2, "triton", "bf16", COLA, {"norm": "online_paper", "recompute": "latent"}),
        (2, "triton", "fp32", COLA, {"norm": "sync"}),
        (2, "triton", "bf16", {"family": "svd"}, {}),
        (2, "triton", "fp8", FP8_MODEL, {}),
        (1, "triton", "fp8", FP8_MODEL, {"recompute": "latent"}),
        (2, "triton", "bf16", LAX, {}),
        (2, "triton", "bf16", {"family": "lax", "lax": {"gate": "tensor"}}, {"recompute": "latent"}),
        (4, "triton", "bf16", LAX, {"recompute": "shared"}),
        (2, "naive", "fp32", LAX, {"recompute": "shared", "group_projections": False, "split_micro_batch": True}),
        (2, "triton", "bf16", LAX, {"recompute": [{"none": 1, "shared": 1, "full": 1}]}),
        (2, "naive", "fp32", COLA, {"recompute": [{"latent": 2, "full": 1}]}),
        (1, "triton", "fp32", LAX, {"recompute": "full"}),
        (2, "triton", "bf16", {"family": "lax", "lax": {"gate": "dense"}}, {}),
        (1, "naive", "fp32", COLA, {}),
        (2, "naive", "fp32", COLA | {"gate_activation": True, "num_key_value_heads": 2}, {}),
        (2, "naive", "bf16", COLA, {}),
        (2, "naive", "bf16", LAX, {}),
        (2, "naive", "fp32", {"family": "lax"}, {"norm": "sync"}),
        (2, "naive", "bf16", COLA, {"recompute": "latent", "split_micro_batch": True}),
        (2, "naive", "fp32", {"family": "svd"}, {"strategy": "vanilla"}),
        (2, "naive", "bf16", {"family": "dense"}, {}),
        (4, "naive", "fp32", {"family": "dense", "tie_embeddings": True}, {}),
        (2, "naive", "bf16", {"family": "svd"}, {"strategy": "vanilla", "group_projections": False}),
        (2, "naive", "fp32", {"family": "dense", "num_key_value_heads": 2}, {"recompute": "full"}),
        (2, "naive", "fp32", COLA | {"num_key_value_heads": 2, "qk_norm": True}, {}),
        (2, "naive", "bf16", COLA | {"qk_norm": True}, {"group_projections": False}),
    )
]  # fmt: skip


@pytest.mark.parametrize(("kernels", "precision", "model", "choice"), KEPT, ids=map(str, KEPT))
def test_activations_are_counted_to_the_byte(
    kernels: Implementation, precision: str, model: dict[str, Any], choice: dict[str, Any]
) -> None:
    few, many = (
        job(model, choice, training={"micro_batch_size": size, "precision": precision}) for size in (2, 4)
    )  # fmt: skip
    each = Activations(few.model, few.parallelism, ELEMENTS[precision], kernels == "triton")
    (stage,) = cut(few.model, few.parallelism, LENGTH)
    crossed = [few.model.crosses_into(layer) for layer in stage.layers]
    modes = block_modes(few.parallelism, stage).values()
    blocks = (each.block(crosses, crosses, mode) for crosses, mode in zip(crossed, modes, strict=True))
    planned = each.embedding + sum(blocks) + each.head()
    assert (kept(many, kernels) - kept(few, kernels)) / (2 * LENGTH) == planned


ON_HOST = [
    (1, "triton", "bf16", COLA, {"recompute": "offload"}),
    (2, "triton", "bf16", COLA, {"recompute": "offload"}),
    (1, "naive", "bf16", COLA, {"recompute": "offload", "group_projections": False}),
    (2, "naive", "fp32", {"family": "svd"}, {"recompute": [{"offload": 1, "full": 1, "none": 1}]}),
    (1, "triton", "bf16", LAX, {"recompute": [{"offload": 2, "latent": 1}]}),
    (4, "triton", "bf16", LAX, {"recompute": "offload"}),
    (2, "naive", "fp32", {"family": "lax", "lax": {"chain_length": 2}}, {"recompute": "offload"}),
    (2, "triton", "fp8", FP8_MODEL, {"recompute": "offload"}),
]


@pytest.mark.full
@pytest.mark.parametrize(("size", "kernels", "precision", "model", "choice"), ON_HOST, ids=map(str, ON_HOST))
def test_what_the_host_has_of_activations_is_counted_to_the_byte(
    size: int, kernels: Implementation, precision: str, model: dict[str, Any], choice: dict[str, Any]
) -> None:
    choice, left, host = {"tensor_parallel_size": size, **choice}, [], []
    for sequences in (2, 4):
        BUFFERS.clear()
        spec = job(model, choice, training={"micro_batch_size": sequences, "precision": precision})
        of_both = kept(spec, kernels)
        host.append(sum(BUFFERS))
        left.append(of_both - host[-1])
    each = Activations(spec.model, spec.parallelism, ELEMENTS[precision], kernels == "triton")
    (stage,) = cut(spec.model, spec.parallelism, LENGTH)
    modes, crosses = block_modes(spec.parallelism, stage), spec.model.crosses_into
    given = {layer: layer > 0 and spec.model.lax is not None for layer in stage.layers}
    blocks = [(crosses(layer), given[layer], mode) for layer, mode in modes.items()]
    away = [each.on_host(*block) for block in blocks]
    assert host[1] - host[0] == 2 * LENGTH * sum(away)
    # The last on its way, and what began the stream, which a lone block has on its way, too.
    planned = each.embedding + sum(each.block(*block) for block in blocks) + each.head()
    planned += [bytes_ for bytes_ in away if bytes_][-1] + (each.stream_start if away[1] else 0)
    assert left[1] - left[0] == 2 * LENGTH * planned


def kept_of_own(spec: JobSpec) -> int:
    """As ``kept``, of a rank's own tokens."""
    with one_rank(spec, "naive"):
        state = TrainState.initial(spec, CPU, draw_weights)
        sequences = np.zeros((spec.training.micro_batch_size, LENGTH + 1), np.int64)
        batch = Batch.of(sequences, None, CPU)
        own = state.partitioner.partition(batch, sequences)
        own.rotation.angles(torch.float32)
        tokens, targets = own.of(batch.tokens), own.of(batch.targets)
        loss_T, left, _ = allocated(lambda: state.model(tokens, targets, own.rotation))
        return left - bytes_of(loss_T)


@pytest.mark.full
@pytest.mark.parametrize(
    ("recompute", "split"), [("none", False), ("latent", False), ("full", False), ("none", True), ("latent", True)]
)
@pytest.mark.parametrize("exchange", ["keys", "latents"])
def test_a_context_parallel_rank_keeps_its_part_of_one_ranks_activations(
    exchange: str, recompute: RecomputeMode, split: bool
) -> None:
    choice = {"context_parallel_size": 2, "recompute": recompute, "context": {"exchange": exchange}}
    choice["split_micro_batch"] = split
    sizes = (4, 8) if split else (2, 4)  # whose plans need no exchange, which nobody answers here
    few, many = (
        job(COLA, choice, training={"micro_batch_size": size, "global_batch_size": sizes[1]}) for size in sizes
    )
    each = Activations(few.model, few.parallelism, 4, kernels=False)
    planned = each.embedding + few.model.num_hidden_layers * each.block(False, False, recompute) + each.head()
    tokens = (sizes[1] - sizes[0]) * LENGTH // 2
    assert (kept_of_own(many) - kept_of_own(few)) / tokens == pytest.approx(planned, rel=0.05)


def test_halves_of_one_sequence_keep_what_it_keeps() -> None:
    choice, one = {"tensor_parallel_size": 2}, {"micro_batch_size": 1}
    whole = kept(job(COLA, choice, training=one), "naive")
    halves = kept(job(COLA, choice | {"split_micro_batch": True}, training=one), "naive")
    assert whole <= halves < 1.02 * whole  # what enters the head is joined


@pytest.mark.full
def test_halves_take_no_more_than_planned_and_no_less_than_without_exchange(ranks: Ranks) -> None:
    """Of one document to a sequence; the plan has room for all keys, of which these need half."""
    spec = job(
        COLA | {"vocab_size": 256, "num_hidden_layers": 2}, {"context_parallel_size": 2, "split_micro_batch": True},
        training={"micro_batch_size": 2, "sequence_length": 16 * LENGTH},
    )  # fmt: skip
    layout = Layout.of(spec.parallelism)
    peak, planned = max(ranks.run(2, over_two_steps, spec)), rank_memory(spec, layout).total
    exchange = PipelineRank(spec, 0, cut(spec.model, spec.parallelism, spec.training.sequence_length))._context()
    assert peak <= planned <= peak + exchange + slack(spec)


APART = {"data": {"documents_apart": True}}
PEAKS = [
    (kernels, precision, model, parallelism, changes)
    for kernels, precision, model, parallelism, changes in (
        ("triton", "bf16", COLA, {"tensor_parallel_size": 2}, {}),
        ("triton", "fp8", FP8_MODEL, {"tensor_parallel_size": 2}, {}),
        ("triton", "bf16", COLA, {"tensor_parallel_size": 2, "recompute": "latent"}, {}),
        ("triton", "bf16", COLA, {"tensor_parallel_size": 2, "recompute": "shared"}, {}),
        ("naive", "fp32", LAX, {"tensor_parallel_size": 2, "recompute": "shared"}, {}),
        ("triton", "bf16", COLA, {"recompute": "offload"}, {}),
        ("naive", "fp32", LAX, {"tensor_parallel_size": 2, "recompute": [{"offload": 2, "latent": 1}]}, APART),
        ("triton", "bf16", COLA, {"tensor_parallel_size": 2, "recompute": [{"full": 1, "shared": 1, "none": 1}]}, {}),
        ("triton", "bf16", COLA, {"tensor_parallel_size": 2, "recompute": "full"}, {}),
        ("triton", "bf16", COLA, {"recompute": "latent"}, {}),
        ("triton", "fp32", LAX, {"recompute": "full"}, {}),
        ("triton", "bf16", COLA, {"data_parallel_size": 2}, {}),
        ("triton", "bf16", COLA, {"data_parallel_size": 4, "zero_stage": 2}, {}),
        ("naive", "fp32", COLA, {"recompute": "latent"}, {}),
        ("naive", "fp32", {"family": "dense"}, {"tensor_parallel_size": 2}, {}),
        ("naive", "fp32", {"family": "svd"}, {"data_parallel_size": 2}, {"optimizer": {"kind": "loro"}}),
        ("naive", "fp32", {"family": "svd", "rank": 64}, {}, {"optimizer": {"kind": "muon"}}),
        ("naive", "fp32", COLA | {"sliding_window": 8, "qk_norm": True}, {"tensor_parallel_size": 2}, {}),
        ("triton", "bf16", COLA, {"data_parallel_size": 2, "optimizer_offload": 0.5}, {}),
        ("naive", "bf16", COLA, {}, APART),
        ("triton", "bf16", COLA | {"sliding_window": 8}, {"tensor_parallel_size": 2}, APART),
    )
]  # fmt: skip


@pytest.mark.parametrize(("kernels", "precision", "model", "parallelism", "changes"), PEAKS, ids=map(str, PEAKS))
def test_a_step_takes_no_more_than_planned_and_hardly_less(
    kernels: Implementation, precision: str, model: dict[str, Any], parallelism: dict[str, Any], changes: dict[str, Any]
) -> None:
    replicas = parallelism.get("data_parallel_size", 1)
    spec = job(
        model, parallelism, resources={"gpus_per_worker": int(kernels == "triton")},
        training={
            "precision": precision, "micro_batch_size": 8, "global_batch_size": 8 * replicas, "cuda_graphs": "off",
        },
        **changes,
    )  # fmt: skip
    with one_rank(spec, kernels), Live() as live:
        state = TrainState.initial(spec, CPU, draw_weights)
        state.optimizer.round_masters()  # as all that gives the weights their values
        training_step(state, RandomTokens(spec))
    assert live.peak <= rank_memory(spec, Layout.of(spec.parallelism)).total <= live.peak + slack(spec)


def slack(spec: JobSpec) -> int:
    """What is not counted storage by storage: a block's backward pass, large gradients, ZeRO's second stage."""
    element = ELEMENTS[spec.training.precision]
    stages = cut(spec.model, spec.parallelism, LENGTH)
    each = Activations(spec.model, spec.parallelism, element, spec.resources.gpus_per_worker > 0)
    crosses = spec.model.lax is not None
    modes = spec.parallelism.modes_of_all(spec.model.num_hidden_layers)
    most = max(each.block_backward(crosses, crosses, mode) for mode in modes)
    backward = spec.training.micro_batch_size * LENGTH * most
    table = spec.model.vocab_size * spec.model.hidden_size // spec.parallelism.tensor_parallel_size
    gradients = (2 * element + 4) * max(largest_weight(spec, stages), table)
    second_stage = sum(group.gradients for group in state_bytes(spec, stages, element))
    return backward + gradients + (second_stage if spec.parallelism.zero_stage == 2 else 0)


@pytest.mark.parametrize(
    ("model", "parallelism", "changes"),
    [(COLA, {}, {}), (LAX, {"recompute": "full"}, {}), (COLA, {}, {"data": {"documents_apart": True}})],
    ids=str,
)
def test_a_captured_step_leaves_room_for_an_evaluation(
    model: dict[str, Any], parallelism: dict[str, Any], changes: dict[str, Any]
) -> None:
    captured, plain = (
        job(
            model, parallelism, resources={"gpus_per_worker": 1},
            training={
                "precision": "bf16", "micro_batch_size": 8, "global_batch_size": 8, "cuda_graphs": graphs,
            },
            **changes,
        )
        for graphs in ("auto", "off")
    )  # fmt: skip
    layout = Layout.of(captured.parallelism)
    room = rank_memory(captured, layout).total - rank_memory(plain, layout).total
    with one_rank(captured, "triton"):
        state = TrainState.initial(captured, CPU, draw_weights)
        sequences = RandomTokens(captured).sequences()[:8]
        with torch.no_grad(), Live() as live:
            losses(state, sequences)
    assert live.peak <= room <= live.peak + slack(captured)


def over_two_steps(spec: JobSpec) -> int:
    """The peak of this rank over two steps."""
    with Live() as live:
        state = TrainState.initial(spec, CPU, draw_weights)
        for _ in range(2):
            training_step(state, RandomTokens(spec))
    return live.peak


MIXES = {
    "1f1b": [{"offload": 1, "full": 1, "latent": 1}, {"offload": 2, "none": 1}],
    "interleaved_1f1b": [{"offload": 1}, {"latent": 1, "none": 1}, {"offload": 1, "none": 1}, {"none": 1}],
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "mixed", "schedule"),
    [
        pytest.param(model, mixed, schedule, marks=() if schedule in some else pytest.mark.nightly)
        for model, mixed, *some in (
            (COLA, False), ({"family": "lax"}, False, "zero_bubble"), (COLA, True, "1f1b", "interleaved_1f1b")
        )
        for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble")
    ],
    ids=str,
)  # fmt: skip
def test_a_pipeline_takes_no_more_than_planned_and_hardly_less(
    ranks: Ranks, model: dict[str, Any], mixed: bool, schedule: str
) -> None:
    recompute = MIXES.get(schedule, "latent") if mixed else "none"
    spec = job(
        model | {"num_hidden_layers": 6},
        {"pipeline_parallel_size": 2, "pipeline_schedule": schedule, "recompute": recompute},
        training={"micro_batch_size": 2, "global_batch_size": 12},
    )  # fmt: skip
    memory = rank_memory(spec, Layout.of(spec.parallelism))
    peak, planned = (
        max(ranks.run(2, over_two_steps, spec)),
        memory.total + memory.host,
    )  # without a GPU one memory has both
    # As above, and zero_bubble's owed gradients, of which there is an upper bound.
    owed = planned / 2 if schedule == "zero_bubble" else 0
    assert peak <= planned <= peak + slack(spec) + owed


GANGS = [
    (model, parallelism, changes | {"training": {"sequence_length": 128} | changes["training"]})
    for model, parallelism, changes in (
        (
            COLA | {
                "hidden_size": 128, "intermediate_size": 352, "rank": 32, "num_hidden_layers": 4, "vocab_size": 1024,
            },
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 2},
            {"training": {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": 8}},
        ),
        (
            {"family": "svd"}, {"tensor_parallel_size": 4, "strategy": "vanilla", "recompute": "full"},
            {"training": {"precision": "bf16"}, "data": {"documents_apart": True}},
        ),
        ({"family": "dense"}, {"tensor_parallel_size": 4}, {"training": {"precision": "bf16"}}),
        (
            LAX | {"tie_embeddings": True}, {"tensor_parallel_size": 2, "data_parallel_size": 2, "recompute": "full"},
            {"training": {"micro_batch_size": 2}},
        ),
        (
            {"family": "cola"}, {"tensor_parallel_size": 2, "context_parallel_size": 2},
            {"training": {"micro_batch_size": 1, "sequence_length": 1024}},
        ),
        (
            {"family": "cola"},
            {"tensor_parallel_size": 2, "context_parallel_size": 2, "context": {"exchange": "latents"}},
            {"training": {"micro_batch_size": 1, "sequence_length": 1024}},
        ),
        (
            {"family": "dense"}, {"context_parallel_size": 4},
            {"training": {"micro_batch_size": 1, "sequence_length": 2048}},
        ),
        (
            {"family": "cola", "num_hidden_layers": 4}, {"pipeline_parallel_size": 2, "context_parallel_size": 2},
            {"training": {"micro_batch_size": 1, "sequence_length": 1024}},
        ),
    )
]  # fmt: skip


def allocated_by_rank(spec: JobSpec) -> int:
    """The most that torch's allocator has given out to this rank at a time, from its start to the end of two steps."""

    def work() -> TrainState:
        state = TrainState.initial(spec, CPU, draw_weights)
        for _ in range(2):
            training_step(state, RandomTokens(spec))
        return state

    return allocated(work)[2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "parallelism", "changes"),
    [pytest.param(*gang, marks=() if gang is GANGS[0] else pytest.mark.nightly, id=str(gang)) for gang in GANGS],
)
def test_real_ranks_are_given_no_more_than_planned_and_hardly_less(
    ranks: Ranks, model: dict[str, Any], parallelism: dict[str, Any], changes: dict[str, Any]
) -> None:
    spec = job(model, parallelism, **changes)
    peak, planned = max(ranks.run(4, allocated_by_rank, spec)), rank_memory(spec, Layout.of(spec.parallelism)).total
    # Of attention with a mask, the plan counts more than a CPU takes at this size.
    assert peak <= planned <= 1.4 * peak, f"{planned / peak:.3f} of {peak:,}"


LENGTH_WITH_CHUNKS = 1024


def by_most_moved(spec: JobSpec) -> tuple[int, int, int]:
    """By plans that move as many tasks as they may: a step's peak; what a forward pass leaves; and tokens that come."""
    sequences = RandomTokens(spec).sequences()[:1]
    batch = Batch.of(sequences, None, CPU)
    most_moved = patch.object(ContextPlanner, "figures", lambda _, plan: SimpleNamespace(seconds=-len(plan.queries)))
    with most_moved, Live() as live:
        state = TrainState.initial(spec, CPU, draw_weights)
        training_step(state, RandomTokens(spec))
        own = state.partitioner.partition(batch, sequences)
        tokens, targets = own.of(batch.tokens), own.of(batch.targets)
        gc.collect()
        before = live.alive_bytes()
        loss_T = state.model(tokens, targets, own.rotation)
        gc.collect()
        left = live.alive_bytes() - before - bytes_of(loss_T)
        queries = state.partitioner._planner.plan((LENGTH_WITH_CHUNKS,), densely=True).queries
    received = sum(each.receiver == state.process_groups.context.rank for each in queries)
    return live.peak, left, received * chunk_tokens(LENGTH_WITH_CHUNKS, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["latent", "none"])
def test_ranks_that_compute_for_others_keep_what_is_planned(ranks: Ranks, recompute: str) -> None:
    """Where outputs come back as latents: they stay, with log-sum-exps and a share of the queries' latents."""
    choice = {"tensor_parallel_size": 2, "context_parallel_size": 2, "recompute": recompute}
    long = {"micro_batch_size": 1, "sequence_length": LENGTH_WITH_CHUNKS}
    kept = {}
    for exchange, pool in (("keys", "tasks"), ("latents", "none"), ("latents", "tasks")):
        context = {"exchange": exchange, "pool": pool}
        spec = job(COLA, choice | {"context": context}, training=long)
        found = ranks.run(4, by_most_moved, spec)
        assert max(peak for peak, _, _ in found) <= rank_memory(spec, Layout.of(spec.parallelism)).total
        kept[exchange, pool] = found
    layer = attention_layer(spec)
    most = max(tokens for _, _, tokens in found)
    assert most == sum(moved_tokens(spec)) > 0
    (rank,) = pipeline_ranks(spec, Layout.of(spec.parallelism))
    assert most * layer.remote_bytes == rank._remote_tasks
    for (_, still, _), (_, moving, tokens) in zip(kept["latents", "none"], kept["latents", "tasks"], strict=True):
        assert moving - still == pytest.approx(3 * tokens * layer.remote_bytes, rel=0.05)


@dataclass(frozen=True)
class Gang:
    """What a schedule asks of a pipeline rank's stages."""

    size: int
    micro_batches: int


def moments(schedule: type, gang: Gang, rank: int) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """All that torch's own order of passes has in hand at one moment or another."""
    order = object.__new__(schedule)
    rounds = max(1, gang.micro_batches // gang.size)
    vars(order).update(
        pp_group_size=gang.size, n_local_stages=2, _n_microbatches=gang.micro_batches,
        microbatches_per_round=gang.micro_batches // rounds,
    )  # fmt: skip
    held, owed, seen = [0, 0], [0, 0], {((0, 0), (0, 0))}
    for action in order._calculate_single_rank_operations(rank):
        if action is None:
            continue
        stage = int(action.stage_index >= gang.size)
        if action.computation_type == schedules.FORWARD:
            held[stage] += 1
        elif action.computation_type == schedules.BACKWARD_WEIGHT:
            owed[stage] -= 1
        else:
            held[stage] -= 1
            owed[stage] += int(action.computation_type == schedules.BACKWARD_INPUT)
        seen.add(((held[0], held[1]), (owed[0], owed[1])))
    return seen


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("interleaved_1f1b", schedules.ScheduleInterleaved1F1B),
        ("zero_bubble", schedules.ScheduleInterleavedZeroBubble),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_what_is_in_hand_is_what_the_schedule_says(name: str, schedule: type, size: int) -> None:
    parallelism = ParallelismConfig.model_validate({"pipeline_parallel_size": size, "pipeline_schedule": name})
    for rounds in (1, 2, 3, 9):
        for rank in range(size):
            ours = in_hand(parallelism, rank, rounds * size)
            torchs = moments(schedule, Gang(size, rounds * size), rank)
            # Of many rounds ours are only the first; what comes later repeats.
            assert ours <= torchs
            for index in (0, 1):
                for stage in (0, 1):
                    assert max(m[index][stage] for m in ours) == max(m[index][stage] for m in torchs)
            assert max(sum(held) for held, _ in ours) == max(sum(held) for held, _ in torchs)
