"""An unsharded decoder of every family written from the formulas, sharing no code with the product's models.

It takes full weights by the product's names. Norms are applied where the papers draw them, in front of the
projection, attention is spelled out, LaX's gates are loops over projections, and torch's cross entropy closes it.
"""

import math

import torch
from torch import Tensor

from boost_core.config import ModelConfig

Weights = dict[str, Tensor]


def token_losses(model: ModelConfig, weight: Weights, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
    x = weight["embedding.weight"][tokens_bs]
    carried: dict[str, list[Tensor]] = {}
    for layer in range(model.num_hidden_layers):
        x = _Block(model, weight, layer, carried)(x)
    head = weight["embedding.weight"].T if model.tie_embeddings else weight["head.weight"]
    logits = _rms_norm(x, weight["head.scale"], model.norm_epsilon) @ head
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_bs.flatten(), reduction="none")


class _Block:
    """One block; ``carried`` holds LaX's latents by projection group and is left for the next block."""

    def __init__(self, model: ModelConfig, weight: Weights, layer: int, carried: dict[str, list[Tensor]]) -> None:
        self.model, self.weight, self.prefix, self.carried = model, weight, f"blocks.{layer}.", carried

    def __call__(self, x: Tensor) -> Tensor:
        model = self.model
        query, key, value = self._project("query_key_value", x, 3, norm=True)
        (attended,) = self._project("output", _attention(model, query, key, value), 1, norm=False)
        x = x + attended
        gate, up = self._project("gate_up", x, 2, norm=True)
        silu_on_gate = model.gate_activation
        if silu_on_gate is None:
            silu_on_gate = model.family in ("dense", "svd") or (model.lax is not None and model.lax.base == "svd")
        gate = gate * torch.sigmoid(gate) if silu_on_gate else gate
        (down,) = self._project("down", gate * up, 1, norm=False)
        return x + down

    def _get(self, name: str) -> Tensor:
        return self.weight[self.prefix + name]

    def _project(self, group: str, x: Tensor, count: int, norm: bool) -> list[Tensor]:
        if norm:
            x = _rms_norm(x, self._get(f"{group}.scale"), self.model.norm_epsilon)
        if self.model.family == "dense":
            return [x @ matrix for matrix in self._dense_matrices(group, norm)]
        down = self._get(f"{group}.down")
        latents = [self._latent(group, index, x @ down[:, index]) for index in range(count)]
        self.carried[group] = latents
        ups = [up for run in range(2) if (up := self.weight.get(f"{self.prefix}{group}.up_{run}")) is not None]
        matrices = [matrix for run in ups for matrix in run]
        return [latent @ matrix for latent, matrix in zip(latents, matrices, strict=True)]

    def _dense_matrices(self, group: str, norm: bool) -> list[Tensor]:
        if not norm:
            return [self._get(f"{group}.weight")]
        runs = [run for i in range(2) if (run := self.weight.get(f"{self.prefix}{group}.weight_{i}")) is not None]
        return [run[:, member] for run in runs for member in range(run.shape[1])]

    def _latent(self, group: str, index: int, h: Tensor) -> Tensor:
        if group in self.carried:
            h = self._cross(group, index, h) if self.model.family == "lax" else h
        cola = self.model.family == "cola" or (self.model.lax is not None and self.model.lax.base == "cola")
        return h * torch.sigmoid(h) if cola else h

    def _cross(self, group: str, index: int, h: Tensor) -> Tensor:
        before = self.carried[group][index]
        if self.model.lax.gate == "dense":
            before = before @ self._get(f"{group}.crossing.gate_matrix")[index]
        if self.model.lax.gate == "tensor":
            left, right = (self._get(f"{group}.crossing.gate_{side}")[index] for side in "ab")
            square = before.view(*before.shape[:-1], len(left), len(right))
            before = (left.T @ square @ right).flatten(-2)
        h = h + before
        centred = h - h.mean(-1, keepdim=True)
        h = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.model.norm_epsilon)
        scale, shift = (self._get(f"{group}.crossing.norm_{part}")[index] for part in ("scale", "shift"))
        return h * scale + shift


def _rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * scale


def _attention(model: ModelConfig, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    sequences, length, _ = query.shape
    heads, group = model.num_attention_heads, model.num_attention_heads // model.key_value_heads
    query, key, value = (x.view(sequences, length, -1, model.head_size) for x in (query, key, value))
    query, key = _rotate(query, model.rope_theta), _rotate(key, model.rope_theta)
    mask = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    out = []
    for head in range(heads):
        scores = query[:, :, head] @ key[:, :, head // group].transpose(1, 2) / math.sqrt(model.head_size)
        out.append(torch.softmax(scores + mask, dim=-1) @ value[:, :, head // group])
    return torch.cat(out, dim=-1)


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Pair (i, i + e/2) of each head as a complex number, turned by position · theta^(-2i/e)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    real, imaginary = x[..., :half], x[..., half:]
    cosine, sine = (f(angle).to(x.dtype)[:, None, :] for f in (torch.cos, torch.sin))
    return torch.cat((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1)
