"""The ways to train a model that are compared, and the shapes at which they are compared."""

from dataclasses import dataclass, field
from typing import Any

from boost_core.kernels.dispatch import Implementation

_AS_PUBLISHED = {"strategy": "btp", "norm": "online_paper", "recompute": "full"}


@dataclass(frozen=True)
class Variant:
    """A family under a strategy with its options.

    Attributes:
        name: For tables.
        family: The model's family.
        parallelism: The job's ``parallelism`` without the sizes.
        kernels: The implementation to use; ``None`` for the device's default.
        published: Whether to run the published code's step in place of the trainer's.
        fp8: Whether products are in 8 bits, on devices that support it.
    """

    name: str
    family: str
    parallelism: dict[str, Any] = field(default_factory=dict)
    kernels: Implementation | None = None
    published: bool = False
    fp8: bool = False

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return str(self.parallelism["strategy"])


VARIANTS = [
    Variant("dense, fullrank", "dense", {"strategy": "fullrank"}),
    # One product and one exchange per projection, like pairs that know nothing of each other.
    Variant("cola, vanilla", "cola", {"strategy": "vanilla", "group_projections": False}),
    # What BOOST's code ran at 7B: its own step instead of the trainer's, over the same tokens, a sequence at a time.
    Variant("cola, as its 7B config", "cola", {"strategy": "btp"}, published=True),
    # BOOST's choices (arXiv 2512.12131): statistics in all-reduces of their own, whole blocks recomputed.
    Variant("cola, btp as published", "cola", _AS_PUBLISHED),
    Variant("cola, btp as published, eager", "cola", _AS_PUBLISHED, kernels="naive"),
    Variant("cola, btp", "cola", {"strategy": "btp"}),
    Variant("cola, btp, eager", "cola", {"strategy": "btp"}, kernels="naive"),
    Variant("cola, btp, fp8", "cola", {"strategy": "btp"}, fp8=True),
    Variant("cola, btp, recompute latent", "cola", {"strategy": "btp", "recompute": "latent"}),
]

# Presets and the tensor parallel sizes of BOOST's systems runs.
PUBLISHED_SIZES = {"1b": 1, "3b": 2, "7b": 4, "13b": 4, "30b": 4}
