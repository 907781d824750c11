"""How much arithmetic a model needs."""

from dataclasses import dataclass

from boost_core.config.job import JobSpec
from boost_core.config.model import ModelConfig
from boost_core.plan.parameters import block_matrix_parameters
from boost_core.plan.peaks import peak_flops_per_second

# Forward and backward are three parts of a block's arithmetic; what is recomputed comes on top.
RECOMPUTED = {"none": 0.0, "latent": 0.5 / 3, "full": 1 / 3}


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one token's forward and backward pass, without recomputation.

    Two for each matrix parameter forward and four backward, and the attention scores counted in full
    (12·L·d·s), as in the PaLM paper's appendix B (arXiv 2204.02311). The embedding look-up is free.
    """
    return model.num_hidden_layers * block_flops_per_token(model, sequence_length) + head_flops_per_token(model)


def hardware_flops_per_token(model: ModelConfig, sequence_length: int, recompute: str) -> float:
    """The same with what the backward pass computes again: ``none``, ``latent`` or ``full``."""
    blocks = model.num_hidden_layers * block_flops_per_token(model, sequence_length)
    return model_flops_per_token(model, sequence_length) + RECOMPUTED[recompute] * blocks


def block_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Those of one block."""
    return 6 * block_matrix_parameters(model) + 12 * model.hidden_size * sequence_length


def head_flops_per_token(model: ModelConfig) -> int:
    """Those of the language-model head."""
    return 6 * model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class FlopRates:
    """What a job's tokens cost, and what its gang could do.

    Attributes:
        model: FLOPs of a token that the model needs.
        hardware: The same with what is computed again.
        peak: FLOPs a second of all the gang's devices at most; ``None`` where that is not known.
    """

    model: int
    hardware: float
    peak: float | None

    @classmethod
    def of(cls, spec: JobSpec, device_name: str) -> "FlopRates":
        """Those of a job at its shape, on devices of this name."""
        length, parallelism = spec.training.sequence_length, spec.parallelism
        peak = peak_flops_per_second(device_name, spec.training.precision)
        return cls(
            model_flops_per_token(spec.model, length),
            hardware_flops_per_token(spec.model, length, parallelism.recompute),
            None if peak is None else parallelism.world_size * peak,
        )

    def utilization(self, tokens_per_second: float, flops_per_token: float) -> float | None:
        """The share of the peak that is used, from 0 to 1; ``None`` where the peak is not known."""
        return None if self.peak is None else tokens_per_second * flops_per_token / self.peak
