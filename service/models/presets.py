"""The published model shapes that a spec may start from, as the API shows them."""

from pydantic import BaseModel, Field


class Preset(BaseModel):
    """One published shape."""

    name: str = Field(description="A spec's model.preset.")
    hidden_size: int = Field(description="Width of the residual stream.")
    intermediate_size: int = Field(description="Width of the MLP.")
    num_hidden_layers: int = Field(description="Decoder blocks.")
    num_attention_heads: int = Field(description="Query heads a block.")
    rank: int = Field(description="Width of every bottleneck, in families that have them.")
    parameters: dict[str, int] = Field(description="How many parameters it has in each family.")


class PresetList(BaseModel):
    """All published shapes."""

    presets: list[Preset] = Field(description="The smallest first.")
