"""Whether a job's model computes the same function as a given one, weights aside."""

from boost_core.architecture.families import is_dense, is_low_rank
from boost_core.config import ModelConfig
from boost_core.convert.published_config import described

# Fields that change when projections are factored to low rank.
_CHANGED_BY_A_CUT = {"family", "rank"}

# Fields that have other names in published configurations than in a job.
_PUBLISHED_NAMES = {
    "norm_epsilon": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "family": "model_type and hidden_act",
    "gate_activation": "hidden_act and only_lr_act", "rope_theta": "rope_theta or rope_parameters",
    "rope_scaling": "rope_scaling or rope_parameters",
}  # fmt: skip


def is_cut(there: ModelConfig, job: ModelConfig) -> bool:
    """Whether a model must be factored to low rank for a job."""
    return is_dense(there) and is_low_rank(job)


def refuse_another_function(there: ModelConfig, job: ModelConfig) -> None:
    """Refuse a model that computes a different function from a job's model with the same weights.

    Raises:
        ValueError: The functions differ. The message lists each differing field with both values.
    """
    theirs, ours = described(there), described(job)
    changed = _CHANGED_BY_A_CUT if is_cut(there, job) else set()
    if is_cut(there, job) and job.latent_activation:
        # With CoLA's activation the factors are only a starting point, so the job may choose the gate.
        changed = changed | {"gate_activation"}
    different = [name for name in ours if name not in changed and theirs[name] != ours[name]]
    if different:
        lines = [f"{name}{_published(name)} is {theirs[name]} there and {ours[name]} in the job" for name in different]
        raise ValueError(f"{'; '.join(lines)}; make the job's model the same, or start from another")


def _published(name: str) -> str:
    return f" (published as {_PUBLISHED_NAMES[name]})" if name in _PUBLISHED_NAMES else ""
