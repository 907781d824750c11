"""Upper bounds, in bytes, on the memory of a rank that moved tasks of attention take.

Most tokens that may move at a time are assumed to, both ways. As queries and outputs: three tensors as wide as queries
are sent and received, and log-sum-exps, and what is received is received again in parts; gradients are computed in
fp32, sent back and received. As latents: shares of latents, sent and received; latents as gathered, in order, with
gradients and their sum; queries before and after rotation, with gradients, and those of the output; and gradients of
two weights. Outputs, log-sum-exps and shares of latents are then kept until the backward pass, in each block whose
attention is not recomputed.
"""

from boost_core.config.chunks import chunk_tokens
from boost_core.config.job import JobSpec
from boost_core.hardware import BYTES
from boost_core.plan.context.between import attention_layer, moved_as
from boost_core.plan.context.dealt import most_moved
from boost_core.plan.machine import machine_for
from boost_core.plan.work import dealt_tokens, rank_tokens

_PRECISE = BYTES["fp32"]


def moved_as_latents(job: JobSpec) -> bool:
    """Whether tasks may move, and their queries and outputs travel as latents."""
    if not _move(job):
        return False
    return moved_as(job, machine_for(job.resources, job.training.precision).cluster) == "latents"


def moved_tokens(job: JobSpec) -> list[int]:
    """Most tokens whose attention a rank computes for others, of each part that is dealt by itself."""
    if not _move(job):
        return [0]
    size = chunk_tokens(job.training.sequence_length, job.parallelism.context_parallel_size)
    return [most_moved(tokens // size) * size for tokens in dealt_tokens(job)]


def task_bytes(job: JobSpec, kernels: bool) -> int:
    """What the backward pass of a block takes for them; without kernels, references keep more steps."""
    layer, tokens = attention_layer(job), max(moved_tokens(job))
    query = layer.query_bytes
    of_gradients = query // layer.element_bytes * _PRECISE
    if not tokens or not moved_as_latents(job):
        return tokens * (3 * layer.asking_bytes(backward=True) + of_gradients + 4 * query)
    share, whole = layer.share_bytes, layer.share_bytes * layer.tensor_parallel_size
    a_token = 6 * share + 6 * whole + (4 if kernels else 6) * query + of_gradients
    weights = 2 * (layer.rank or 0) * query  # in the compute type: a rank of columns as wide as queries
    return tokens * a_token + rank_tokens(job) * (share + whole) + weights


def kept_bytes(job: JobSpec) -> int:
    """What a block keeps of other ranks' tasks until the backward pass, if its attention is not recomputed."""
    return sum(moved_tokens(job)) * attention_layer(job).foreign_bytes if moved_as_latents(job) else 0


def _move(job: JobSpec) -> bool:
    return job.parallelism.context.pool == "tasks" and job.parallelism.context_parallel_size > 1
