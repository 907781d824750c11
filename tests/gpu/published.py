"""One rank's step as run by the code published with BOOST under its 7B configuration (arXiv 2512.12131): a baseline.

It is timed beside ours by the kit for a GPU machine and counted beside ours by ``tests.benchmarks``.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.profiler import record_function

from boost_core.bench.rank import LoneCommunicator, Step, random_batches
from boost_core.config import JobSpec, ModelConfig
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import Rotation, dense_attention
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.parallel.communicator import CommunicationLedger, Communicator, copy_to_tp, reduce_from_tp
from tests.benchmarks.rank import Variant

# What that configuration does, line by line, each operation in the order and on the memory of that code:
#
# - micro-batches of one sequence, gradients accumulated over several; nothing is recomputed in the backward pass;
# - ``rmsnorm_type`` is left unset: each rank norms its own shard of the residual, and no statistic is exchanged, so
#   that on several ranks the model differs from a single rank's;
# - the embedding is split along the vocabulary, summed over the ranks whole, and sliced; the head is tied to it;
# - queries, keys and values come from one einsum; keys and values are concatenated, permuted and copied before the
#   rotary embedding;
# - the last block's output is gathered by way of two transpositions; logits are made whole, in fp32;
# - every all-reduce is waited for where it starts;
# - gradients are bf16, and added to fp32 sums one by one after each micro-batch; the norm, clipping, torch's fused
#   AdamW on fp32 masters and rounding are separate passes.
#
# Where that code uses Flash Attention's kernels, this one uses torch's RMSNorm, torch's attention and our rotary
# embedding, which takes one kernel less. Shape suffixes: T tokens, d hidden (this rank's shard), r rank, c = g·r for g
# projections, f wide (shard), V this rank's part of the vocabulary, h heads, e head size.

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.01, 1.0
INITIAL_STD = 0.025


class PublishedBlock(nn.Module):
    """A decoder block.

    Args:
        model: The model's shape; with as many key heads as query heads.
        ranks: The tensor parallel group.
        rotation: The rotary embedding.
    """

    def __init__(self, model: ModelConfig, ranks: Communicator, rotation: Rotation) -> None:
        super().__init__()
        d, f, r = model.hidden_size // ranks.size, model.intermediate_size // ranks.size, model.bottleneck_rank
        self.ranks, self.rotation, self.head_size, self.epsilon = ranks, rotation, model.head_size, model.norm_epsilon
        self.attention_scale, self.mlp_scale = _empty(d), _empty(d)
        self.qkv_down, self.qkv_up = _empty(3 * r, d), _empty(3, d, r)
        self.output_down, self.output_up = _empty(r, d), _empty(d, r)
        self.gate_up_down, self.gate_up_up = _empty(2 * r, d), _empty(2, f, r)
        self.down_down, self.down_up = _empty(r, f), _empty(d, r)

    def forward(self, x_Td: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the stream."""
        normed_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.attention_scale, self.epsilon)
        query_Td, key_Td, value_Td = self._batched(normed_Td, self.qkv_down, self.qkv_up).unbind(0)
        both_2Td = torch.cat([key_Td.unsqueeze(0), value_Td.unsqueeze(0)], dim=0)
        both_T2d = both_2Td.permute(1, 0, 2).contiguous()
        parts = [query_Td.unsqueeze(0), both_T2d[:, :1].transpose(0, 1), both_T2d[:, 1:].transpose(0, 1)]
        rotated = rotary(parts, *self.rotation.angles(x_Td.dtype))
        query_bhse, key_bhse, value_bhse = (
            each_Td.view(1, len(x_Td), -1, self.head_size).transpose(1, 2) for each_Td in rotated
        )
        out_bhse = dense_attention(query_bhse, key_bhse, value_bhse)
        z_Tr = self._latents(out_bhse.transpose(1, 2).reshape(len(x_Td), -1), self.output_down)
        x_Td = functional.linear(copy_to_tp(z_Tr, self.ranks, "latent"), self.output_up) + x_Td

        normed_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.mlp_scale, self.epsilon)
        gate_Tf, up_Tf = self._batched(normed_Td, self.gate_up_down, self.gate_up_up).unbind(0)
        z_Tr = self._latents(gate_Tf * up_Tf, self.down_down)
        return functional.linear(copy_to_tp(z_Tr, self.ranks, "latent"), self.down_up) + x_Td

    def _latents(self, x_Td: torch.Tensor, down_cd: torch.Tensor) -> torch.Tensor:
        return functional.silu(reduce_from_tp(functional.linear(x_Td, down_cd), self.ranks, "latent"))

    def _batched(self, x_Td: torch.Tensor, down_cd: torch.Tensor, up_gfr: torch.Tensor) -> torch.Tensor:
        z_gTr = self._latents(x_Td, down_cd).view(len(x_Td), len(up_gfr), -1).transpose(0, 1)
        return torch.einsum("gtr,gfr->gtf", copy_to_tp(z_gTr, self.ranks, "latent"), up_gfr)


class PublishedModel(nn.Module):
    """Embedding, blocks, final norm, tied head and the loss of each token.

    Args:
        model: The model's shape.
        ranks: The tensor parallel group.
        rotation: The rotary embedding for the length of a sequence.
    """

    def __init__(self, model: ModelConfig, ranks: Communicator, rotation: Rotation) -> None:
        super().__init__()
        self.ranks, self.epsilon = ranks, model.norm_epsilon
        self.embedding = _empty(model.vocab_size // ranks.size, model.hidden_size)
        self.blocks = nn.ModuleList(PublishedBlock(model, ranks, rotation) for _ in range(model.num_hidden_layers))
        self.scale = _empty(model.hidden_size)

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token of one sequence in nats, ``[T]``."""
        if self.ranks.size == 1:
            x_Td = functional.embedding(token_T, self.embedding)
        else:
            rows, columns = len(self.embedding), self.scale.numel() // self.ranks.size
            local_T, elsewhere_T = _local(token_T, self.ranks.rank * rows, rows)
            whole_Td = functional.embedding(local_T, self.embedding) * (~elsewhere_T).unsqueeze(-1)
            whole_Td = copy_to_tp(reduce_from_tp(whole_Td, self.ranks, "embedding"), self.ranks, "embedding")
            x_Td = whole_Td[:, self.ranks.rank * columns : (self.ranks.rank + 1) * columns]
        for block in self.blocks:
            x_Td = block(x_Td)
        if self.ranks.size > 1:
            x_Td = _GatherColumns.apply(x_Td, self.ranks)  # type: ignore[no-untyped-call]
        x_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.scale, self.epsilon)
        logits_TV = functional.linear(copy_to_tp(x_Td, self.ranks, "hidden"), self.embedding)
        precise = torch.promote_types(logits_TV.dtype, torch.float32)
        return _HeadLossOfLogits.apply(logits_TV.to(precise), target_T, self.ranks)  # type: ignore[no-any-return, no-untyped-call]


class PublishedRun:
    """Optimizer steps of one rank.

    Args:
        model: The model's shape.
        ranks: The tensor parallel group.
        length: Tokens of a sequence.
        dtype: The compute type.
        device: Where it is computed.

    Raises:
        ValueError: The model has grouped-query attention.
    """

    def __init__(
        self, model: ModelConfig, ranks: Communicator, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if model.key_value_heads != model.num_attention_heads:
            raise ValueError("the published step has as many key heads as query heads; leave num_key_value_heads out")
        self._ranks, self._device = ranks, device
        self.model = PublishedModel(model, ranks, Rotation(length, model.head_size, model.rope_theta, device))
        self.model.to_empty(device=device).to(dtype)
        for weight in self.model.parameters():
            nn.init.normal_(weight, std=INITIAL_STD) if weight.ndim > 1 else nn.init.ones_(weight)
        self._weights, precise = list(self.model.parameters()), torch.promote_types(dtype, torch.float32)
        self._masters = [nn.Parameter(weight.detach().to(precise, copy=True)) for weight in self._weights]
        flat = torch.zeros(sum(weight.numel() for weight in self._weights), dtype=precise, device=device)
        sizes = [weight.numel() for weight in self._weights]
        self._sums = [
            sums.view_as(master) for master, sums in zip(self._masters, torch.split(flat, sizes), strict=True)
        ]
        for master, sums in zip(self._masters, self._sums, strict=True):
            master.grad = sums
        self._optimizer = torch.optim.AdamW(self._masters, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, token_bt: torch.Tensor) -> float:
        """Run one step over ``[b, s + 1]`` tokens, a sequence at a time; returns the loss, which the host waits for."""
        token_bt, losses = token_bt.to(self._device), list[torch.Tensor]()
        for token_t in token_bt:
            with record_function("forward"):
                loss_T, counts_T = self.model(token_t[:-1], token_t[1:]), torch.ones_like(token_t[1:], dtype=torch.bool)
                loss = (loss_T * counts_T).sum(dtype=loss_T.dtype) / counts_T.sum() / len(token_bt)
            with record_function("backward"):
                loss.backward()
                self._accumulate()
            losses.append(loss.detach())
        with record_function("optimizer"), torch.no_grad():
            norms = torch.stack([torch.linalg.vector_norm(sums) for sums in self._sums])
            square = torch.linalg.vector_norm(norms).pow(2.0)
            norm = self._ranks.all_reduce_(square, "gradient norm").pow_(0.5)
            clip = torch.clamp(CLIP_NORM / (norm + 1e-6), max=1.0)
            for sums in self._sums:
                sums.mul_(clip)
            self._optimizer.step()
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
            for sums in self._sums:
                sums.zero_()
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def _accumulate(self) -> None:
        for weight, sums in zip(self._weights, self._sums, strict=True):
            if weight.grad is None:
                raise AssertionError("no gradient reached a weight")
            sums.add_(weight.grad)
            weight.grad = None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Td: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.columns, ctx.ranks = x_Td.shape[1], ranks
        gathered_pdT = ranks.all_gather(x_Td.transpose(0, 1).contiguous(), "hidden")
        return gathered_pdT.flatten(0, 1).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.split(gradients[0], ctx.columns, dim=1)[ctx.ranks.rank].contiguous(), None


class _HeadLossOfLogits(torch.autograd.Function):
    """Cross entropy of whole logits, whose softmax is kept."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        maximum_T = ranks.all_reduce_(logits_TV.max(dim=-1)[0], "loss maximum", dist.ReduceOp.MAX)
        shifted_TV = logits_TV - maximum_T.unsqueeze(-1)
        local_T, elsewhere_T = _local(target_T, ranks.rank * logits_TV.shape[1], logits_TV.shape[1])
        row_T = torch.arange(len(local_T), device=local_T.device)
        predicted_T = shifted_TV[row_T, local_T].clone()
        predicted_T[elsewhere_T] = 0.0
        ranks.all_reduce_(predicted_T, "loss target")
        softmax_TV = torch.exp(shifted_TV, out=shifted_TV)
        sum_T = ranks.all_reduce_(softmax_TV.sum(dim=-1), "loss sum")
        loss_T = torch.log(sum_T) - predicted_T
        softmax_TV.div_(sum_T.unsqueeze(-1))
        ctx.save_for_backward(softmax_TV, elsewhere_T, local_T, row_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax_TV, elsewhere_T, local_T, row_T = ctx.saved_tensors
        softmax_TV[row_T, local_T] -= 1.0 - elsewhere_T.to(softmax_TV.dtype)
        return softmax_TV.mul_(gradients[0].unsqueeze(-1)), None, None


def _local(id_T: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids relative to this rank's own, 0 for others; and which ones are others."""
    elsewhere_T = (id_T < first) | (id_T >= first + count)
    local_T = id_T.clone() - first
    local_T[elsewhere_T] = 0
    return local_T, elsewhere_T


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def published_step(spec: JobSpec, device: torch.device, name: str) -> Step:
    """As ``boost_core.bench.rank.step_of``, for the published code: a sequence at a time, over the same tokens."""
    sampler, ledger, training = random_batches(spec), CommunicationLedger(), spec.training
    ranks, dtype = LoneCommunicator(dist.group.WORLD, "tp", ledger), COMPUTE_TYPES[training.precision]
    run = PublishedRun(spec.model, ranks, training.sequence_length, dtype, device)

    def step() -> None:
        loss = run.step(torch.from_numpy(sampler.sequences(0, training.micro_batch_size)))
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} diverges, with a loss of {loss:g}; no more of it is timed")

    return Step(step, ledger, None)


PUBLISHED = Variant("cola, as its 7B config", "cola", {"strategy": "btp"}, make_step=published_step)
