"""How much arithmetic a model needs."""

from dataclasses import dataclass

from boost_core.architecture.sharding import chosen_sharding
from boost_core.config.job import JobSpec
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import TRAITS, ParallelismConfig
from boost_core.hardware import peak_flops_per_second
from boost_core.plan.parameters import block_matrix_parameters

# Forward and backward passes are three units of a block's arithmetic; recomputation comes on top.
RECOMPUTED = {"nothing": 0.0, "segments": 0.5 / 3, "all": 1 / 3}  # by ``ModeTraits.again``


def model_flops_per_token(model: ModelConfig, sequence_length: int, attended: float = 1.0) -> int:
    """Return the FLOPs of one token's forward and backward pass, without recomputation.

    Two per matrix parameter forward and four backward, plus the attention scores counted in full
    (12·L·d·s, or 12·L·d·w with a sliding window w < s), as in the PaLM paper's appendix B (arXiv 2204.02311). The
    embedding look-up is free. Only the share ``attended`` of the scores counts; see ``TrainingConfig.attended_share``.
    """
    block = block_flops_per_token(model, sequence_length, attended)
    return model.num_hidden_layers * block + head_flops_per_token(model)


def hardware_flops_per_token(
    model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int, attended: float = 1.0
) -> float:
    """Return the FLOPs that all tensor parallel ranks compute per token, with duplicated and recomputed work."""
    block, modes = (
        computed_block_flops_per_token(model, parallelism, sequence_length, attended),
        parallelism.modes_of_all,
    )
    blocks = sum(count * (1 + RECOMPUTED[TRAITS[mode].again]) for mode, count in modes(model.num_hidden_layers).items())
    return blocks * block + head_flops_per_token(model)


def block_flops_per_token(model: ModelConfig, sequence_length: int, attended: float = 1.0) -> int:
    """Return the model FLOPs per token of one block."""
    return 6 * block_matrix_parameters(model) + _attention_flops_per_token(model, sequence_length, attended)


def computed_block_flops_per_token(
    model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int, attended: float = 1.0
) -> int:
    """Return the FLOPs per token of one block on all tensor parallel ranks together.

    The matrices are divided among the ranks, and so are the heads, except under vanilla: there queries, keys and values
    are whole on every rank, and each computes the attention of all heads.
    """
    ranks = 1 if chosen_sharding(model, parallelism).wide else parallelism.tensor_parallel_size
    return 6 * block_matrix_parameters(model) + ranks * _attention_flops_per_token(model, sequence_length, attended)


def _attention_flops_per_token(model: ModelConfig, sequence_length: int, attended: float) -> int:
    scores = 12 * model.hidden_size * min(sequence_length, model.sliding_window or sequence_length)
    return round(attended * scores)


def head_flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs per token of the language-model head."""
    return 6 * model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class FlopRates:
    """FLOPs per token of a job, and the peak rate of its gang.

    Attributes:
        model: FLOPs per token that the model needs.
        hardware: FLOPs per token that the gang computes, with duplicated and recomputed work.
        peak: Peak FLOPs per second of all the gang's devices; ``None`` if unknown.
    """

    model: int
    hardware: float
    peak: float | None

    @classmethod
    def of(cls, spec: JobSpec, device_name: str) -> "FlopRates":
        """Return the rates of a job in its layout, on devices of this name."""
        length, parallelism, attended = spec.training.sequence_length, spec.parallelism, spec.training.attended_share
        peak = peak_flops_per_second(device_name, spec.training.precision)
        return cls(
            model_flops_per_token(spec.model, length, attended),
            hardware_flops_per_token(spec.model, parallelism, length, attended),
            None if peak is None else parallelism.world_size * peak,
        )

    def utilization(self, tokens_per_second: float, flops_per_token: float) -> float | None:
        """Return the share of the peak that is used, from 0 to 1; ``None`` if the peak is unknown."""
        return None if self.peak is None else tokens_per_second * flops_per_token / self.peak
