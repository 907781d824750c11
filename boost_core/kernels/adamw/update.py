"""The parameters of one AdamW step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamWUpdate:
    """Rates and step.

    Attributes:
        learning_rate: lr.
        betas: β₁ and β₂.
        epsilon: ε.
        weight_decay: decay.
        step: t, from 1.
    """

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    step: int

    @property
    def corrections(self) -> tuple[float, float]:
        """1 − β₁ᵗ and 1 − β₂ᵗ."""
        first, second = self.betas
        return 1 - first**self.step, 1 - second**self.step
