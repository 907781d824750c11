"""Whether a job's model computes what a given one does, weights aside."""

from boost_core.architecture.families import is_dense, is_low_rank
from boost_core.config import ModelConfig
from boost_core.convert.published_config import described

# What a projection cut to low rank cannot keep.
_CHANGED_BY_A_CUT = {"family", "rank"}

# Where published configurations have other names than a job.
_PUBLISHED_NAMES = {
    "norm_epsilon": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "family": "model_type and hidden_act",
    "gate_activation": "hidden_act and only_lr_act", "rope_theta": "rope_theta or rope_parameters",
    "rope_scaling": "rope_scaling or rope_parameters",
}  # fmt: skip


def is_cut(there: ModelConfig, job: ModelConfig) -> bool:
    """Whether a model is cut to low rank for a job."""
    return is_dense(there) and is_low_rank(job)


def refuse_another_function(there: ModelConfig, job: ModelConfig) -> None:
    """Refuse a model that computes something else than a job's would with the same weights.

    Raises:
        ValueError: It does. The message has each field that differs, with both values.
    """
    theirs, ours = described(there), described(job)
    changed = _CHANGED_BY_A_CUT if is_cut(there, job) else set()
    if is_cut(there, job) and job.latent_activation:
        # CoLA's activation makes of the cut a start only; its gate is the job's to choose.
        changed = changed | {"gate_activation"}
    different = [name for name in ours if name not in changed and theirs[name] != ours[name]]
    if different:
        lines = [f"{name}{_published(name)} is {theirs[name]} there and {ours[name]} in the job" for name in different]
        raise ValueError(f"{'; '.join(lines)}; make the job's model the same, or start from another")


def _published(name: str) -> str:
    return f" (published as {_PUBLISHED_NAMES[name]})" if name in _PUBLISHED_NAMES else ""
