"""What each tensor parallel strategy sends, per block.

Counted in elements of the payload handed to all-reduces on one rank; d hidden size, f MLP size, r rank.

========  ==============================  =================================
strategy  wide or latent elements         what they are
========  ==============================  =================================
fullrank  2d                              attention and MLP output
vanilla   5d + 2f (4d → GQA's widths)     the wide output of all seven pairs
btp       7r                              the latents of all seven pairs
========  ==============================  =================================

(BOOST, arXiv 2512.12131.) Under btp the norms' sums of squares come on top: as one more column of a latent's payload
(``fused``, this project's) or in collectives of their own.
"""

from dataclasses import dataclass

from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.strategy import chosen_strategy
from boost_core.plan.parameters import projections

_NORMED = ("query", "key", "value", "gate", "up")


@dataclass(frozen=True)
class BlockCommunication:
    """All-reduces of one block in one direction.

    Attributes:
        all_reduces: How many.
        elements: Activation elements a token over all of them: wide outputs or latents.
        statistic_elements: Elements a token that carry the norms' sums of squares.
    """

    all_reduces: int
    elements: int
    statistic_elements: int


def block_forward(model: ModelConfig, parallelism: ParallelismConfig) -> BlockCommunication:
    """What one block sends forward."""
    strategy = chosen_strategy(model, parallelism)
    if strategy == "fullrank":
        return BlockCommunication(2, 2 * model.hidden_size, 0)
    if strategy == "vanilla":
        widths = [wide_out for _, wide_out in projections(model).values()]
        # One exchange for each run of equal widths: grouped-query attention has a narrower key and value.
        grouped = 4 if model.key_value_size == model.hidden_size else 5
        return BlockCommunication(grouped if parallelism.group_projections else len(widths), sum(widths), 0)
    # A statistic for each matrix product that a norm precedes.
    statistics = 2 if parallelism.group_projections else len(_NORMED)
    latents = 4 if parallelism.group_projections else len(projections(model))
    apart = 0 if parallelism.norm == "fused" else statistics
    return BlockCommunication(latents + apart, 7 * model.bottleneck_rank, statistics)


def block_backward(model: ModelConfig, parallelism: ParallelismConfig) -> BlockCommunication:
    """What one block sends backward: the gradients of what its matrix products were given."""
    strategy = chosen_strategy(model, parallelism)
    if strategy == "fullrank":
        return BlockCommunication(2, 2 * model.hidden_size, 0)
    if strategy == "vanilla":
        normed = 2 if parallelism.group_projections else len(_NORMED)
        elements = (normed + 1) * model.hidden_size + model.intermediate_size
        return BlockCommunication(normed + 2, elements, 0)
    # Every exchange has its conjugate; of the statistics only those of ``sync`` do.
    forward = block_forward(model, parallelism)
    if parallelism.norm == "sync":
        return forward
    apart = forward.statistic_elements if parallelism.norm == "online_paper" else 0
    return BlockCommunication(forward.all_reduces - apart, forward.elements, 0)


def block_forward_bytes(model: ModelConfig, parallelism: ParallelismConfig, tokens: int, bytes_per_element: int) -> int:
    """Bytes of activations (statistics left out) that one block sends forward for ``tokens`` tokens."""
    return block_forward(model, parallelism).elements * tokens * bytes_per_element
