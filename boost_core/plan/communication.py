"""What bottleneck-aware tensor parallelism sends, per block and in all.

Counted in elements of the payload handed to a collective on one rank. The latents of a block: q, k and v
in one all-reduce of 3r, the attention output's r, gate and up in one of 2r, the MLP output's r. The two
that follow a norm carry one more column, the sum of squares (BOOST, arXiv 2512.12131, section on BTP; the
statistic in the same payload is this project's).
"""

from dataclasses import dataclass

from boost_core.config.model import ModelConfig


@dataclass(frozen=True)
class BlockCommunication:
    """Collectives of one block in one direction.

    Attributes:
        all_reduces: How many.
        latent_elements: Latent elements a token over all of them.
        statistic_elements: Elements a token that carry the norms' sums of squares.
    """

    all_reduces: int
    latent_elements: int
    statistic_elements: int


def block_forward(model: ModelConfig) -> BlockCommunication:
    """What one block sends forward: four all-reduces of 7r latent elements a token, plus two statistics."""
    return BlockCommunication(all_reduces=4, latent_elements=7 * model.rank, statistic_elements=2)


def block_backward(model: ModelConfig) -> BlockCommunication:
    """What one block sends backward: the latents' gradients. The norm's statistic needs no collective."""
    return BlockCommunication(all_reduces=4, latent_elements=7 * model.rank, statistic_elements=0)


def block_forward_latent_bytes(model: ModelConfig, tokens: int, bytes_per_element: int) -> int:
    """Latent payload bytes of one block's forward pass over ``tokens`` tokens."""
    return block_forward(model).latent_elements * tokens * bytes_per_element
