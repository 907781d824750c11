"""The shape of a model."""

from enum import Enum
from math import inf, log
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from boost_core.config.base import Config, FieldProblem, raise_problems

# Published model shapes.
#
# ``60m`` to ``1b`` and ``7b`` are from the CoLA paper (arXiv 2502.10940); ``3b``, ``13b`` and ``30b`` are from BOOST's
# systems runs (arXiv 2512.12131), which use LLaMA's shapes with r = d/4; ``40b`` adds layers to the 30B shape;
# ``tiny`` is ours, for laptops.


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip((*_SIZES, "rank"), shape, strict=True)) | ({"gate_activation": True} if gated else {})
    for name, gated, shape in (
        ("tiny", True, (128, 344, 4, 4, 32)),
        ("60m", True, (512, 1376, 8, 8, 128)),
        ("130m", True, (768, 2048, 12, 12, 256)),
        ("350m", False, (1024, 2736, 24, 16, 256)),
        ("1b", False, (2048, 5461, 24, 32, 512)),
        ("3b", False, (3072, 8192, 28, 24, 768)),
        ("7b", False, (4096, 11008, 32, 32, 1024)),
        ("13b", False, (5120, 13824, 40, 40, 1280)),
        ("30b", False, (8192, 22016, 36, 64, 2048)),
        ("40b", False, (8192, 22016, 48, 64, 2048)),
    )
}


FamilyName = Literal["dense", "svd", "cola", "lax"]


class Activation(Enum):
    """What is applied to latents, or to the MLP's gate, by the name that published configurations have for it.

    ``kernels.latent_epilogue`` computes each.
    """

    LINEAR = "linear"
    SILU = "silu"


_OF_THE_BOTTLENECK = ("rank", "gate_activation")


def _sizes_or_preset(schema: dict[str, Any]) -> None:
    """Let a preset replace the sizes in the JSON schema, which the fields cannot express one by one."""
    schema["required"] = [field for field in schema["required"] if field not in _SIZES]
    schema["anyOf"] = [{"required": ["preset"], "properties": {"preset": {"type": "string"}}}, {"required": [*_SIZES]}]


class LaxConfig(Config):
    """How LaX lets a latent cross from one block to the next (arXiv 2505.21732)."""

    base: Literal["cola", "svd"] = Field("cola", description="Family of the underlying bottleneck.")
    gate: Literal["identity", "dense", "tensor"] = Field(
        "identity", description="Gate applied to the carried latent: none, an r × r matrix, or two small matrices."
    )
    chain_length: Annotated[int, Field(ge=1, le=512)] | None = Field(
        None,
        description="Start a new chain of latents every this many blocks. Default: they cross into every block except "
        "the first, and cross pipeline stages along with the residual.",
    )


# The rope_type to which each setting belongs, and its default; None if the default depends on the factor.
_OF_ROPE_TYPE = {
    "low_freq_factor": ("llama3", 1.0),
    "high_freq_factor": ("llama3", 4.0),
    "beta_fast": ("yarn", 32.0),
    "beta_slow": ("yarn", 1.0),
    "attention_factor": ("yarn", None),
}


RopeSetting = Annotated[float | None, Field(gt=0, validate_default=True)]


class RopeScalingConfig(Config):
    """How rotary frequencies are scaled for longer sequences, named as in Hugging Face's ``config.json``."""

    rope_type: Literal["llama3", "yarn"] = Field(description="The published scaling method.")
    factor: float = Field(ge=1, le=10_000, description="Factor by which slow pairs of elements are slowed down.")
    original_max_position_embeddings: int = Field(
        ge=2, le=16_777_216, description="Sequence length for which the unscaled frequencies were meant."
    )
    low_freq_factor: RopeSetting = Field(
        None, description="llama3: pairs with at most this many turns are slow. Default: 1."
    )
    high_freq_factor: RopeSetting = Field(
        None, description="llama3: pairs with at least this many turns are fast. Default: 4."
    )
    beta_slow: RopeSetting = Field(None, description="yarn: pairs with at most this many turns are slow. Default: 1.")
    beta_fast: RopeSetting = Field(None, description="yarn: pairs with at least this many turns are fast. Default: 32.")
    attention_factor: RopeSetting = Field(
        None, le=100, description="yarn: factor applied to queries and keys. Default: 0.1 ln(factor) + 1."
    )

    @field_validator(*_OF_ROPE_TYPE)
    @classmethod
    def _setting_belongs_to_its_type(cls, value: float | None, info: Any) -> float | None:
        rope_type, (owner, default) = info.data.get("rope_type"), _OF_ROPE_TYPE[info.field_name]
        if value is not None and rope_type not in (owner, None):
            raise ValueError(f"{rope_type} has no {info.field_name}; leave it out, or set rope_type to {owner}")
        if value is None and rope_type == owner:
            value = 0.1 * log(info.data["factor"]) + 1 if default is None and "factor" in info.data else default
        slow = {"high_freq_factor": "low_freq_factor", "beta_fast": "beta_slow"}.get(info.field_name)
        if slow and value is not None and (least := info.data.get(slow)) is not None and value <= least:
            raise ValueError(f"{value} must exceed {slow}={least}: a fast pair turns more often than a slow one")
        return value


class ModelConfig(Config):
    """A LLaMA-shaped decoder, dense or with low-rank bottlenecks for the seven projections of each block.

    A ``preset`` fills in whatever is not given with it, so ``{preset: tiny, rank: 16}`` is the tiny model with a
    narrower bottleneck.
    """

    model_config = ConfigDict(json_schema_extra=_sizes_or_preset)

    preset: str | None = Field(
        None, description="Name of a published model to start from.", json_schema_extra={"enum": [*PRESETS, None]}
    )
    family: FamilyName = Field(
        "cola",
        description="dense: no bottleneck; svd: a linear bottleneck; cola: one with a SiLU; lax: latents cross blocks.",
    )
    lax: LaxConfig | None = Field(None, validate_default=True, description="For family=lax only.")
    vocab_size: int = Field(256, ge=2, le=1_000_000, description="Number of token ids.")
    hidden_size: int = Field(ge=8, le=65_536, description="Width d of the residual stream.")
    intermediate_size: int = Field(ge=8, le=262_144, description="Width f of the MLP.")
    num_hidden_layers: int = Field(ge=1, le=512, description="Number L of decoder blocks.")
    num_attention_heads: int = Field(ge=1, le=1024, description="Query heads per block.")
    num_key_value_heads: int | None = Field(
        None, ge=1, description="Key and value heads (grouped-query attention); default: the number of query heads."
    )
    rank: int | None = Field(
        None, ge=1, validate_default=True, description="Width r of every bottleneck; none for family=dense."
    )
    gate_activation: bool | None = Field(
        None,
        description="Apply SiLU to the MLP's gate. Default: on, unless the bottleneck applies one (CoLA "
        "keeps both at 60M and 130M).",
    )
    tie_embeddings: bool = Field(False, description="Share the embedding's weights with the head.")
    rope_theta: float = Field(10_000.0, gt=0, le=1e12, description="Base of the rotary position frequencies.")
    rope_scaling: RopeScalingConfig | None = Field(
        None, description="Scale the rotary frequencies for sequences longer than the model has seen."
    )
    sliding_window: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        None, description="Number of positions each position attends to, itself included. Default: all up to itself."
    )
    qk_norm: bool = Field(
        False,
        description="Apply RMSNorm to each head's queries and keys before rotation, as in Qwen3; not for vanilla.",
    )
    norm_epsilon: float = Field(1e-6, gt=0, lt=1, description="Term added to the mean square in RMSNorm.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("preset") is None:
            return fields
        name = fields["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            problem = f"there is no preset {str(name)[:100]!r}; choose one of {', '.join(PRESETS)}"
            raise_problems("ModelConfig", [FieldProblem(("preset",), name, problem)])
        preset = PRESETS[name]
        if fields.get("family") == "dense":
            preset = {field: value for field, value in preset.items() if field not in _OF_THE_BOTTLENECK}
        return {**preset, **fields}

    @field_validator("lax", "rope_scaling", "num_key_value_heads", "num_attention_heads", "rank")
    @classmethod
    def _fields_go_together(cls, value: Any, info: Any) -> Any:
        """Check a field beside those before it, of which invalid ones are missing, and fill in LaX's defaults."""
        family, hidden_size, theta = map(info.data.get, ("family", "hidden_size", "rope_theta"))
        heads, is_set, problem = info.data.get("num_attention_heads"), value is not None, ""
        match info.field_name:
            case "lax" if is_set and family != "lax":
                problem = f"family={family} has no latent crossing; leave lax out, or set family=lax"
            case "lax":
                return value or (LaxConfig() if family == "lax" else None)
            case "rope_scaling" if is_set and theta is not None and theta <= 1:
                problem = f"rope_theta={theta} has no slow pairs to scale; set rope_theta above 1, or leave it out"
            case "num_key_value_heads" if is_set and heads is not None and heads % value:
                problem = f"{value} does not divide num_attention_heads={heads}; choose a divisor of {heads}"
            case "num_attention_heads" if hidden_size and (hidden_size % value or (hidden_size // value) % 2):
                problem = f"hidden_size={hidden_size} does not split into {value} heads of an even size "
                problem += "(rotary embeddings turn pairs); change num_attention_heads or hidden_size"
            case "rank" if is_set and family == "dense":
                problem = "family=dense has no bottleneck; leave rank out, or choose another family"
            case "rank" if hidden_size and family not in (None, "dense"):
                usual = f"usually hidden_size/4={hidden_size // 4}"
                if not is_set:
                    problem = f"family={family} needs the width of its bottlenecks; {usual}"
                elif value > hidden_size:
                    problem = f"{value} is above hidden_size={hidden_size}: no bottleneck; choose less, {usual}"
        if problem:
            raise ValueError(problem)
        return value

    @property
    def bottleneck_rank(self) -> int:
        """Width r of every bottleneck.

        Raises:
            ValueError: The family has no bottleneck.
        """
        if self.rank is None:
            raise ValueError(f"family={self.family} has no bottleneck")
        return self.rank

    @property
    def bottleneck_activation(self) -> Activation:
        """The activation of the bottlenecks' latents."""
        cola = self.family == "cola" or (self.lax is not None and self.lax.base == "cola")
        return Activation.SILU if cola else Activation.LINEAR

    @property
    def outputs_from_latents(self) -> bool:
        """Whether the outputs of all projections depend on their inputs through latents alone."""
        return self.rank is not None

    def crosses_into(self, layer: int) -> bool:
        """Whether latents of the previous block cross into this one."""
        return self.lax is not None and layer % (self.lax.chain_length or inf) != 0

    @property
    def mlp_activation(self) -> Activation:
        """The activation of the MLP's gate, with the family's default filled in: one, unless the bottleneck has one."""
        default = self.bottleneck_activation is Activation.LINEAR
        gated = default if self.gate_activation is None else self.gate_activation
        return Activation.SILU if gated else Activation.LINEAR

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads, with the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Width of a token's keys (and of its values) over all heads."""
        return self.key_value_heads * self.head_size


# Sparse attention in training.

BLOCK = 64  # tokens per block of sparse attention
LAST_QUERIES = 64  # per document; they choose what all its queries see
RUN_SCORES = 1 << 20  # upper limit per run of a document's queries, unless a single block of them has more
SAMPLED_QUERIES = 32  # per document; recall is measured on these


class SparseAttentionConfig(Config):
    """Attention to a subset of the keys, chosen for each document by each layer and head in each step.

    The last 64 queries of a document choose what all its queries see: verticals, which are keys that all queries see,
    and slashes, which are whole blocks of 64 keys at a fixed distance from the query.
    """

    kind: Literal["vertical_slash"] = Field(
        description="Every query sees certain keys, and the keys at certain distances from it."
    )
    budget: float = Field(
        0.05, gt=0, le=0.5, description="Upper limit on the pairs computed, as a share of a document's causal pairs."
    )
    mass: Annotated[float, Field(gt=0, le=1)] = Field(
        0.98,
        description="Stop adding keys once this share of the last queries' attention is kept, even below the budget.",
    )
    sink: int = Field(30, ge=0, le=4096, description="Number of tokens at a document's start that are always seen.")
    window: Annotated[int, Field(ge=1, le=65536)] = Field(
        100, description="Nearest tokens that a query always sees, itself included; rounded up to blocks of 64."
    )
    from_length: int = Field(16384, ge=256, le=1_048_576, description="Shorter documents use dense attention.")
    recall: Annotated[float, Field(gt=0, le=1)] = Field(
        0.95, description="Share of dense attention that should be kept; a lower share is reported as a fault."
    )

    @property
    def near_blocks(self) -> int:
        """Number of nearest blocks that are always seen, the query's own block included."""
        return 1 + -(-(self.window - 1) // BLOCK)

    def pairs(self, tokens: int) -> int:
        """Query-key pairs that the budget allows for a document of this length."""
        return int(self.budget * (tokens * (tokens + 1) // 2))

    def always_pairs(self, tokens: int) -> int:
        """Upper bound on the query-key pairs that are always seen in a document of this length."""
        own = tokens * (BLOCK + 1) // 2
        near = sum(BLOCK * max(0, tokens - BLOCK * distance) for distance in range(1, self.near_blocks))
        return own + near + self.sink * max(0, tokens - BLOCK * self.near_blocks)
