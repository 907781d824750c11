"""A LLaMA with low-rank projections, seven per block, for transformers; exports contain a copy of this file.

    y = act(x A) B                               A is cola_a, B is cola_b
    y = act(LN(x A + G(z)) ∘ scale + shift) B    LaX: z is the latent, act(…), of the same projection one block before

Everything else is transformers' Mistral, which is a LLaMA with an optional sliding window: rotary embeddings, grouped
queries, KV cache, attention backends, generation. This file needs only torch and transformers.

Shape suffixes: b sequences, s positions, d input, r rank, f output; p·q = r for LaX's tensor gate.
"""

from typing import Any

import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.activations import ACT2FN


class BoostConfig(MistralConfig):
    """The fields of CoLA's published configuration, and a few more.

    Args:
        rank: Width r of every bottleneck.
        hidden_act: Activation of all bottlenecks.
        only_lr_act: If ``gate_act`` is not given, whether the MLP's gate has no activation; otherwise it has
            ``hidden_act``.
        gate_act: Activation of the MLP's gate.
        lax: LaX's ``gate`` (``identity``, ``dense`` or ``tensor``) and ``chain_length``; ``None`` for a model without.
        qk_norm: Whether RMSNorm is applied to each head's queries and keys.
        sliding_window: Number of positions that each position sees, itself included; ``None`` for all up to itself.
    """

    model_type = "boost"
    base_model_tp_plan = None  # Mistral's is for dense projections

    def __init__(
        self,
        rank: int | None = None,
        hidden_act: str = "silu",
        only_lr_act: bool = True,
        gate_act: str | None = None,
        lax: dict[str, Any] | None = None,
        qk_norm: bool = False,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.rank, self.only_lr_act, self.lax, self.qk_norm = rank or 0, only_lr_act, lax, qk_norm
        self.gate_act = gate_act or ("linear" if only_lr_act else hidden_act)
        super().__init__(hidden_act=hidden_act, sliding_window=sliding_window, **kwargs)
        self.rank = rank or self.hidden_size // 4

    def crosses_into(self, layer: int) -> bool:
        """Whether latents of the previous block cross into this one."""
        if self.lax is None or layer == 0:
            return False
        chain = self.lax["chain_length"]
        return chain is None or layer % chain != 0


class BoostForCausalLM(MistralForCausalLM):
    """A causal language model whose parameters are named as in CoLA's published class."""

    config_class = BoostConfig
    supports_gradient_checkpointing = False  # a recomputed block would not find the previous one's latent

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp.act_fn = ACT2FN[config.gate_act]
            before = self.model.layers[index - 1] if config.crosses_into(index) else None
            for part in ("self_attn", "mlp"):
                of_layer, of_before = getattr(layer, part), getattr(before, part, None)
                for name, dense in list(of_layer.named_children()):
                    if isinstance(dense, nn.Linear):
                        setattr(of_layer, name, Bottleneck(config, dense, getattr(of_before, name, None)))
            if config.qk_norm:
                attention = layer.self_attn
                for name, projection in (("q_norm", attention.q_proj), ("k_norm", attention.k_proj)):
                    norm = nn.RMSNorm(attention.head_dim, config.rms_norm_eps)
                    setattr(attention, name, norm)
                    projection.norms_heads_by(norm)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Bottleneck):
            module.initialize()


class Bottleneck(nn.Module):
    """A projection in low-rank form.

    Args:
        config: The model's configuration.
        dense: The projection that it replaces.
        before: The same projection of the previous block, if its latent crosses into this one.
    """

    def __init__(self, config: BoostConfig, dense: nn.Linear, before: "Bottleneck | None") -> None:
        super().__init__()
        empty = dense.weight.new_empty
        self.cola_a = nn.Parameter(empty(dense.in_features, config.rank))
        self.cola_b = nn.Parameter(empty(config.rank, dense.out_features))
        self.act_fn = ACT2FN[config.hidden_act]
        self.crossing = Crossing(config, empty) if before is not None else None
        self._before: tuple[Any] = (before,)  # in a tuple, so that it is not registered as a submodule of this one
        self._hands_on = False
        self._latent: Any = None
        self._norm: tuple[Any] = (None,)  # the attention's, as in Qwen3
        if before is not None:
            before._hands_on = True
        self.initialize()

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """``[b, s, d]`` to ``[b, s, f]``."""
        z_bsr = x_bsd @ self.cola_a
        if self.crossing is not None:
            z_bsr = self.crossing(z_bsr, self._before[0].take_latent().to(z_bsr.device))
        z_bsr = self.act_fn(z_bsr)
        if self._hands_on:
            self._latent = z_bsr
        y_bsf: torch.Tensor = z_bsr @ self.cola_b
        (norm,) = self._norm
        if norm is not None:
            y_bsf = norm(y_bsf.unflatten(-1, (-1, len(norm.weight)))).flatten(-2)
        return y_bsf

    def norms_heads_by(self, norm: nn.Module) -> None:
        """Apply a norm to each head of the output."""
        self._norm = (norm,)

    def take_latent(self) -> torch.Tensor:
        """Return this forward pass's latent and drop it, so that it does not outlive the pass."""
        latent_bsr: torch.Tensor = self._latent
        self._latent = None
        return latent_bsr

    def initialize(self) -> None:
        """Set CoLA's initial values (arXiv 2502.10940); norm scales start at one, gates like default linear maps."""
        wide = len(self.cola_a) + self.cola_b.shape[1]
        for factor in (self.cola_a, self.cola_b):
            nn.init.normal_(factor, std=(self.cola_b.shape[0] * wide) ** -0.25)
        for name, weight in self.crossing.named_parameters() if self.crossing is not None else ():
            if name == "norm_scale":
                nn.init.ones_(weight)
            elif name == "norm_shift":
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=(3 * len(weight)) ** -0.5)


class Crossing(nn.Module):
    """How a latent crosses from one block into the next (LaX, arXiv 2505.21732)."""

    def __init__(self, config: BoostConfig, empty: Any) -> None:
        super().__init__()
        rank, self.epsilon = config.rank, config.rms_norm_eps
        shorter = max(width for width in range(1, int(rank**0.5) + 1) if rank % width == 0)
        sides: dict[str, dict[str, int]] = {
            "identity": {},
            "dense": {"gate_matrix": rank},
            "tensor": {"gate_a": shorter, "gate_b": rank // shorter},
        }
        for name, side in sides[(config.lax or {})["gate"]].items():
            self.register_parameter(name, nn.Parameter(empty(side, side)))
        self.norm_scale, self.norm_shift = nn.Parameter(empty(rank)), nn.Parameter(empty(rank))

    def forward(self, h_bsr: torch.Tensor, z_bsr: torch.Tensor) -> torch.Tensor:
        """The activation's input, from x A and the previous block's latent."""
        crossed_bsr = h_bsr + self._gated(z_bsr)
        return nn.functional.layer_norm(
            crossed_bsr, crossed_bsr.shape[-1:], self.norm_scale, self.norm_shift, self.epsilon
        )

    def _gated(self, z_bsr: torch.Tensor) -> torch.Tensor:
        gates = dict(self.named_parameters())
        if "gate_matrix" in gates:
            return z_bsr @ gates["gate_matrix"]
        if "gate_a" in gates:
            z_bspq = z_bsr.unflatten(-1, (len(gates["gate_a"]), len(gates["gate_b"])))
            z_bsr = (gates["gate_a"].T @ z_bspq @ gates["gate_b"]).flatten(-2)
        return z_bsr
