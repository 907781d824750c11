"""What CoLA's published class computes from an exported folder alone, in float64, written from facts about its code.

The facts, of https://github.com/alvin-zyl/CoLA (``cola/configuration_cola.py``, ``cola_layer.py``,
``modeling_cola.py``), which needs a release of transformers of early 2025 and is not on PyPI; ``python -m
tests.benchmarks.published_cola`` holds both this module and the exports to the class itself.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# Each field that decides what the class computes, and the value that it has where config.json has none.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads; keys and values are made for all heads, so fewer do not run
    "head_dim": None,  # hidden_size / num_attention_heads
    "rank": None,  # hidden_size / 4
    "hidden_act": "silu",  # of all seven bottlenecks, and of the gate unless only_lr_act
    "only_lr_act": True,
    "lr_act_type": None,  # stored and never used
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
# Read from tensors' shapes, or by nobody while logits are computed.
WITHOUT_EFFECT = {
    "architectures", "model_type", "vocab_size", "intermediate_size", "max_position_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "torch_dtype", "auto_map",
}  # fmt: skip

ACTIVATIONS = {"silu": torch.nn.functional.silu, "linear": lambda x: x}


def log_probabilities(folder: Path, tokens_s: Tensor) -> Tensor:
    """The logarithms of each next token's probabilities, ``[s, V]``."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    return _Cola(DEFAULTS | config, weights)(tokens_s)


class _Cola:
    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        assert not any(config[name] for name in ("rope_scaling", "attention_bias", "mlp_bias"))
        assert config["head_dim"] in (None, config["hidden_size"] // config["num_attention_heads"])
        assert config["num_key_value_heads"] in (None, config["num_attention_heads"])
        self.config, self.weights = config, weights
        self.activation = ACTIVATIONS[config["hidden_act"]]

    def __call__(self, tokens_s: Tensor) -> Tensor:
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[tokens_s]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(f"{at}.self_attn", self._norm(f"{at}.input_layernorm", x))
            x = x + self._mlp(f"{at}.mlp", self._norm(f"{at}.post_attention_layernorm", x))
        head = embedding if self.config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        return (self._norm("model.norm", x) @ head.T).log_softmax(-1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _projected(self, name: str, x: Tensor) -> Tensor:
        down, up = (self.weights[f"{name}.cola_{factor}"] for factor in "ab")
        assert down.shape[1] == (self.config["rank"] or self.config["hidden_size"] // 4)
        return self.activation(x @ down) @ up

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up = self._projected(f"{at}.gate_proj", x), self._projected(f"{at}.up_proj", x)
        gate = gate if self.config["only_lr_act"] else self.activation(gate)
        return self._projected(f"{at}.down_proj", gate * up)

    def _attention(self, at: str, x: Tensor) -> Tensor:
        heads = self.config["num_attention_heads"]
        query, key, value = (
            self._projected(f"{at}.{each}_proj", x).unflatten(-1, (heads, -1)).transpose(0, 1) for each in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        return self._projected(f"{at}.o_proj", attended.transpose(0, 1).flatten(1))

    def _rotated(self, x_hse: Tensor) -> Tensor:
        """Halves of a head as the parts of complex numbers, turned by position · base^(-2i/e)."""
        _, length, size = x_hse.shape
        exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
        angle = torch.outer(torch.arange(length, dtype=torch.float64), self.config["rope_theta"] ** -exponent)
        turned = torch.complex(*x_hse.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1)
