"""The shape of a model."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from boost_core.config.base import Config, FieldProblem, raise_problems
from boost_core.config.presets import PRESETS


class ModelConfig(Config):
    """A decoder of the LLaMA shape whose seven projections a block are low-rank bottlenecks.

    A ``preset`` fills in whatever is not given next to it, so ``{preset: tiny, rank: 16}`` is the
    tiny model with a narrower bottleneck.
    """

    preset: str | None = Field(None, description="Name of a published shape to start from.")
    family: Literal["cola"] = Field("cola", description="How the bottleneck is built: CoLA puts a SiLU on the latent.")
    vocab_size: int = Field(256, ge=2, le=1_000_000, description="Number of token ids.")
    hidden_size: int = Field(ge=8, le=65_536, description="Width d of the residual stream.")
    intermediate_size: int = Field(ge=8, le=262_144, description="Width f of the MLP.")
    num_hidden_layers: int = Field(ge=1, le=512, description="Number L of decoder blocks.")
    num_attention_heads: int = Field(ge=1, le=1024, description="Query heads a block.")
    num_key_value_heads: int | None = Field(
        None, ge=1, description="Key and value heads (grouped-query attention); default: as many as query heads."
    )
    rank: int = Field(ge=1, description="Width r of every bottleneck.")
    gate_activation: bool = Field(
        False,
        description="Keep the SiLU on the gate beside the one in the bottleneck (CoLA does so at 60M and 130M).",
    )
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    norm_epsilon: float = Field(1e-6, gt=0, lt=1, description="Added to the mean square in RMSNorm.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = given["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            problem = f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}"
            raise_problems("ModelConfig", [FieldProblem(("preset",), name, problem)])
        return {**PRESETS[name], **given}

    @field_validator("num_key_value_heads")
    @classmethod
    def _key_value_heads_divide(cls, value: int | None, info: Any) -> int | None:
        heads = info.data.get("num_attention_heads")
        if value is not None and heads is not None and heads % value:
            raise ValueError(f"{value} does not divide num_attention_heads={heads}; choose a divisor of {heads}")
        return value

    @field_validator("num_attention_heads")
    @classmethod
    def _heads_divide_hidden_size(cls, value: int, info: Any) -> int:
        hidden_size = info.data.get("hidden_size")
        if hidden_size is not None and (hidden_size % value or (hidden_size // value) % 2):
            raise ValueError(
                f"hidden_size={hidden_size} does not split into {value} heads of an even size "
                "(rotary embeddings turn pairs); change num_attention_heads or hidden_size"
            )
        return value

    @field_validator("rank")
    @classmethod
    def _rank_is_a_bottleneck(cls, value: int, info: Any) -> int:
        hidden_size = info.data.get("hidden_size")
        if hidden_size is not None and value > hidden_size:
            raise ValueError(
                f"{value} is above hidden_size={hidden_size}: no bottleneck; choose at most {hidden_size}, "
                f"usually hidden_size/4={hidden_size // 4}"
            )
        return value

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Width of the keys (and of the values) of one token over all heads."""
        return self.key_value_heads * self.head_size
