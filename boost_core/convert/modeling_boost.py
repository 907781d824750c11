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
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralModel,
    MistralPreTrainedModel,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
    MistralRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # as they are computed


class BoostConfig(MistralConfig):
    """The fields of CoLA's published configuration except ``only_lr_act``, and a few more.

    Args:
        rank: Width r of every bottleneck; ``None`` for a quarter of ``hidden_size``.
        hidden_act: Activation of all bottlenecks.
        gate_act: Activation of the MLP's gate.
        lax: LaX's ``gate`` (``identity``, ``dense`` or ``tensor``) and ``chain_length``; ``None`` for a model without.
        qk_norm: Whether RMSNorm is applied to each head's queries and keys.
        sliding_window: Number of positions that each position sees, itself included; ``None`` for all up to itself.
    """

    model_type = "boost"
    base_model_tp_plan = base_model_pp_plan = None  # Mistral's are for dense projections and blocks without latents

    def __init__(
        self,
        rank: int | None = None,
        hidden_act: str = "silu",
        gate_act: str = "linear",
        lax: dict[str, Any] | None = None,
        qk_norm: bool = False,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.gate_act, self.lax, self.qk_norm = gate_act, lax, qk_norm
        super().__init__(hidden_act=hidden_act, sliding_window=sliding_window, **kwargs)
        self.rank = rank or self.hidden_size // 4

    def crosses_into(self, layer: int) -> bool:
        """Whether latents of the previous block cross into this one."""
        if self.lax is None or not 0 < layer < self.num_hidden_layers:
            return False
        chain = self.lax["chain_length"]
        return chain is None or layer % chain != 0


class ColaConfig(BoostConfig):
    """CoLA's published configuration, of models that its class computes as well.

    Args:
        only_lr_act: Whether the MLP's gate has no activation; otherwise it has ``hidden_act``.
        hidden_act: Activation of all bottlenecks.
    """

    model_type = "cola"

    def __init__(self, only_lr_act: bool = True, hidden_act: str = "silu", **kwargs: Any) -> None:
        self.only_lr_act = only_lr_act
        super().__init__(hidden_act=hidden_act, gate_act="linear" if only_lr_act else hidden_act, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The published fields: none that CoLA's class lacks, and the rotary base where it reads it."""
        fields: dict[str, Any] = super().to_dict()
        for name in ("gate_act", "lax", "qk_norm"):
            del fields[name]
        return fields | {"rope_theta": (fields.get("rope_parameters") or fields)["rope_theta"]}


class BoostPreTrainedModel(MistralPreTrainedModel):
    """What the models below have in common."""

    config_class: type[BoostConfig] = BoostConfig
    _no_split_modules = ["BoostDecoderLayer"]  # noqa: RUF012  # as transformers declares it

    def _init_weights(self, module: nn.Module) -> None:
        """Set CoLA's initial values (arXiv 2502.10940); norm scales start at one, gates like default linear maps."""
        if isinstance(module, Bottleneck):
            std = (module.rank * (module.in_features + module.out_features)) ** -0.25
            nn.init.normal_(module.cola_a, std=std)
            nn.init.normal_(module.cola_b, std=std)
        elif isinstance(module, Crossing):
            nn.init.ones_(module.norm_scale)
            nn.init.zeros_(module.norm_shift)
            for gate in module.gates():
                nn.init.normal_(gate, std=(3 * len(gate)) ** -0.5)
        else:
            super()._init_weights(module)


class BoostModel(BoostPreTrainedModel, MistralModel):
    """The model without a head."""

    def __init__(self, config: BoostConfig) -> None:
        PreTrainedModel.__init__(self, config)  # Mistral's would make dense projections first
        # Without padding_idx, which would keep the embedding of the end of document, with which we pad, from training.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BoostDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = MistralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MistralRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """As Mistral's. Latents belong to the pass, because several threads may run the model at once."""
        return super().forward(input_ids, latents=Latents(), **kwargs)


class BoostForCausalLM(BoostPreTrainedModel, MistralForCausalLM):
    """A causal language model whose parameters are named as in CoLA's published class."""

    def __init__(self, config: BoostConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = BoostModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class BoostForSequenceClassification(BoostPreTrainedModel, MistralForSequenceClassification):
    """A classifier of sequences by their last token that is not padding."""

    def __init__(self, config: BoostConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = BoostModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class ColaModel(BoostModel):
    """A model of type ``cola`` without a head."""

    config_class = ColaConfig


class ColaForCausalLM(BoostForCausalLM):
    """A causal language model of type ``cola``."""

    config_class = ColaConfig


class ColaForSequenceClassification(BoostForSequenceClassification):
    """A classifier of type ``cola``."""

    config_class = ColaConfig


class Latents:
    """What crosses from one block into the next in one pass, by projection; nothing in models without LaX.

    Not a dictionary, because wrappers of modules, such as FSDP's and accelerate's, copy those that they pass on.

    Args:
        before_bsr: The latents of the block before, in the order of ``PROJECTIONS``.

    Attributes:
        before: The same by projection.
        after: Those of the block itself, in the same order.
    """

    def __init__(self, before_bsr: tuple[torch.Tensor, ...] = ()) -> None:
        self.before = dict(zip(PROJECTIONS, before_bsr, strict=False))
        self.after: dict[str, torch.Tensor] = {}


class BoostDecoderLayer(MistralDecoderLayer):
    """A block."""

    def __init__(self, config: BoostConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = BoostAttention(config, layer_idx)
        self.mlp = BoostMLP(config, layer_idx)
        self.input_layernorm = MistralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MistralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, hidden_states: torch.Tensor, *, latents: Latents, **kwargs: Any) -> torch.Tensor:
        """``[b, s, d]`` to ``[b, s, d]``, replacing the latents of the pass by this block's.

        ``forward`` takes and returns them as tensors, because gradient checkpointing runs it once more.
        """
        hidden_states, *after_bsr = super().__call__(hidden_states, *latents.after.values(), **kwargs)
        latents.after = dict(zip(PROJECTIONS, after_bsr, strict=False))
        return hidden_states

    def forward(self, hidden_states: torch.Tensor, *before_bsr: torch.Tensor, **kwargs: Any) -> tuple[Any, ...]:
        """The block's output, and the latents that cross into the next one, in the order of ``PROJECTIONS``."""
        latents = Latents(before_bsr)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), latents=latents, **kwargs)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), latents)
        return hidden_states, *latents.after.values()


class BoostAttention(MistralAttention):
    """Mistral's attention with low-rank projections, and with norms of queries and keys as in Qwen3 if configured."""

    def __init__(self, config: BoostConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout, self.is_causal = self.head_dim**-0.5, config.attention_dropout, True
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Bottleneck(config, layer_idx, "q_proj", config.hidden_size, queries)
        self.k_proj = Bottleneck(config, layer_idx, "k_proj", config.hidden_size, keys)
        self.v_proj = Bottleneck(config, layer_idx, "v_proj", config.hidden_size, keys)
        self.o_proj = Bottleneck(config, layer_idx, "o_proj", queries, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        latents: Latents,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[b, s, d]`` to ``[b, s, d]`` and, from some backends, the attention weights."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states, latents).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states, latents).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states, latents).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(
                key, value, self.layer_idx, {"cache_position": kwargs.get("cache_position")}
            )
        backend = self.config._attn_implementation
        attention = eager_attention_forward if backend == "eager" else ALL_ATTENTION_FUNCTIONS[backend]
        attended, weights = attention(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=self.config.sliding_window, **kwargs,
        )  # fmt: skip
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1), latents), weights


class BoostMLP(MistralMLP):
    """Mistral's gated MLP with low-rank projections."""

    def __init__(self, config: BoostConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.gate_proj = Bottleneck(config, layer_idx, "gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = Bottleneck(config, layer_idx, "up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = Bottleneck(config, layer_idx, "down_proj", config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.gate_act]

    def forward(self, x_bsd: torch.Tensor, latents: Latents) -> torch.Tensor:
        """``[b, s, d]`` to ``[b, s, d]``."""
        gate_bsf = self.act_fn(self.gate_proj(x_bsd, latents))
        y_bsd: torch.Tensor = self.down_proj(gate_bsf * self.up_proj(x_bsd, latents), latents)
        return y_bsd


class Bottleneck(nn.Linear):
    """A projection in low-rank form.

    It is an ``nn.Linear`` by type, because that is where adapters, such as peft's LoRA, are put: beside it, from its
    input to its output.

    Args:
        config: The model's configuration.
        layer_idx: The block.
        name: The projection, one of ``PROJECTIONS``.
        in_features: Width d of the input.
        out_features: Width f of the output.
    """

    def __init__(self, config: BoostConfig, layer_idx: int, name: str, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)
        self.name, self.rank, self.in_features, self.out_features = name, config.rank, in_features, out_features
        self.cola_a = nn.Parameter(torch.empty(in_features, config.rank))
        self.cola_b = nn.Parameter(torch.empty(config.rank, out_features))
        self.register_parameter("bias", None)
        self.act_fn = ACT2FN[config.hidden_act]
        self.crossing = Crossing(config) if config.crosses_into(layer_idx) else None
        self.crosses_out = config.crosses_into(layer_idx + 1)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # nothing may be put there
        """Empty, on the device of the factors: no matrix computes the projection, so none can be merged into it."""
        return self.cola_b.new_empty(0)

    def forward(self, x_bsd: torch.Tensor, latents: Latents) -> torch.Tensor:  # type: ignore[override]
        """``[b, s, d]`` to ``[b, s, f]``.

        Args:
            x_bsd: The input.
            latents: Where the latent of the block before is, if it crosses into this one, and where this one's is put,
                if it crosses into the next. It is not returned, because adapters add to what is.
        """
        z_bsr = x_bsd @ self.cola_a
        if self.crossing is not None:
            z_bsr = self.crossing(z_bsr, latents.before[self.name].to(z_bsr.device))
        z_bsr = self.act_fn(z_bsr)
        if self.crosses_out:
            latents.after[self.name] = z_bsr
        y_bsf: torch.Tensor = z_bsr @ self.cola_b
        return y_bsf

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"in_features={self.in_features}, rank={self.rank}, out_features={self.out_features}"


class Crossing(nn.Module):
    """How a latent crosses from one block into the next (LaX, arXiv 2505.21732)."""

    def __init__(self, config: BoostConfig) -> None:
        super().__init__()
        rank, self.epsilon = config.rank, config.rms_norm_eps
        shorter = max(width for width in range(1, int(rank**0.5) + 1) if rank % width == 0)
        sides: dict[str, dict[str, int]] = {
            "identity": {},
            "dense": {"gate_matrix": rank},
            "tensor": {"gate_a": shorter, "gate_b": rank // shorter},
        }
        for name, side in sides[(config.lax or {})["gate"]].items():
            self.register_parameter(name, nn.Parameter(torch.empty(side, side)))
        self.norm_scale, self.norm_shift = nn.Parameter(torch.empty(rank)), nn.Parameter(torch.empty(rank))

    def gates(self) -> list[nn.Parameter]:
        """The gate's matrices: none, one or, of the tensor gate, two."""
        return [weight for name, weight in self.named_parameters() if name.startswith("gate_")]

    def forward(self, h_bsr: torch.Tensor, z_bsr: torch.Tensor) -> torch.Tensor:
        """The activation's input, from x A and the previous block's latent."""
        match self.gates():
            case [matrix]:
                z_bsr = z_bsr @ matrix
            case [gate_a, gate_b]:
                z_bspq = z_bsr.unflatten(-1, (len(gate_a), len(gate_b)))
                z_bsr = (gate_a.T @ z_bspq @ gate_b).flatten(-2)
        crossed_bsr = h_bsr + z_bsr
        return nn.functional.layer_norm(
            crossed_bsr, crossed_bsr.shape[-1:], self.norm_scale, self.norm_shift, self.epsilon
        )
