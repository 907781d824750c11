"""What a block's tensor parallel ranks send each other, counted in elements handed to all-reduces on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from boost_core.architecture.strategies import Payload, block_exchanges
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig


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
    return _summed(block_exchanges(model, parallelism).forward)


def block_backward(model: ModelConfig, parallelism: ParallelismConfig) -> BlockCommunication:
    """What one block sends backward: the gradients of what its matrix products were given."""
    return _summed(block_exchanges(model, parallelism).backward)


def block_forward_bytes(model: ModelConfig, parallelism: ParallelismConfig, tokens: int, bytes_per_element: int) -> int:
    """Bytes of activations (statistics left out) that one block sends forward for ``tokens`` tokens."""
    return block_forward(model, parallelism).elements * tokens * bytes_per_element


def _summed(payloads: Sequence[Payload]) -> BlockCommunication:
    return BlockCommunication(
        len(payloads),
        sum(payload.elements for payload in payloads),
        sum(payload.statistics for payload in payloads),
    )
