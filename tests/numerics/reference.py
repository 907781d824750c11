"""An unsharded CoLA-LLaMA written from the formulas, sharing no code with the product's model.

It takes full weights by the product's names. Norms are applied where the papers draw them, in front of the
projection, attention is spelled out, and torch's own cross entropy closes it.
"""

import math

import torch
from torch import Tensor

from boost_core.config import ModelConfig


def token_losses(model: ModelConfig, weight: dict[str, Tensor], tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
    x = weight["embedding.weight"][tokens_bs]
    for layer in range(model.num_hidden_layers):
        x = _block(model, weight, f"blocks.{layer}.", x)
    logits = _rms_norm(x, weight["head.scale"], model.norm_epsilon) @ weight["head.weight"]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_bs.flatten(), reduction="none")


def _block(model: ModelConfig, weight: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    normed = _rms_norm(x, weight[prefix + "query_key_value.scale"], model.norm_epsilon)
    query, key, value = (_cola(weight, prefix + "query_key_value", i, normed, model.rank) for i in range(3))
    x = x + _cola(weight, prefix + "output", 0, _attention(model, query, key, value), model.rank)
    normed = _rms_norm(x, weight[prefix + "gate_up.scale"], model.norm_epsilon)
    gate, up = (_cola(weight, prefix + "gate_up", i, normed, model.rank) for i in range(2))
    if model.gate_activation:
        gate = gate * torch.sigmoid(gate)
    return x + _cola(weight, prefix + "down", 0, gate * up, model.rank)


def _cola(weight: dict[str, Tensor], prefix: str, index: int, x: Tensor, rank: int) -> Tensor:
    latent = x @ weight[f"{prefix}.down"][:, index * rank : (index + 1) * rank]
    return (latent * torch.sigmoid(latent)) @ weight[f"{prefix}.up_{index}"]


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
