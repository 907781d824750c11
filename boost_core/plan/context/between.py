"""What context parallel ranks send each other: keys and values, or latents; and the same for moved queries."""

from collections.abc import Callable

from boost_core.architecture.sharding import chosen_sharding
from boost_core.config.job import JobSpec
from boost_core.config.legality import cannot_send_latents
from boost_core.hardware import BYTES
from boost_core.plan.cluster import Cluster
from boost_core.plan.context.cost import AttentionLayer, Exchange


def attention_layer(job: JobSpec) -> AttentionLayer:
    """A layer's attention on each rank, which has all heads where its tensor parallel strategy does not split them."""
    model, parallelism = job.model, job.parallelism
    ranks = parallelism.tensor_parallel_size if chosen_sharding(model, parallelism).wide else 1
    return AttentionLayer(
        model.hidden_size, model.key_value_size, model.num_attention_heads, model.rank, ranks,
        BYTES[job.training.precision],
    )  # fmt: skip


def sent_between_nodes(job: JobSpec, cluster: Cluster) -> Exchange:
    """What a job's ranks send to other nodes; if the job chooses ``latents``, within a node, too.

    Latents if a rank's share of them over the outermost links, plus the other ranks' shares over the innermost, takes
    less time than keys and values over the outermost. Computing keys from them costs little compared with attention.

    Args:
        job: The job at a layout.
        cluster: The network of its ranks.
    """
    return _faster(job, cluster, lambda layer: (layer.key_bytes, layer.latent_bytes, layer.gathered_bytes))


def moved_as(job: JobSpec, cluster: Cluster) -> Exchange:
    """What the queries and outputs of a job's moved tasks travel as: latents, or ``keys`` for what they are.

    By the same rule, for all that is sent for a token, forward and backward. It may differ from what is sent of keys:
    with few heads of keys, these are no wider than latents, but queries are.

    Args:
        job: The job at a layout.
        cluster: The network of its ranks.
    """

    def sizes(layer: AttentionLayer) -> tuple[int, int, int]:
        """Bytes of all passes and ways, as they are, as latents, and within a node for these."""
        passes = (False, True)
        wide, latents = (sum(sum(layer.moved_bytes(each, how)) for each in passes) for how in _HOW)
        return wide, latents, sum(layer.asking_gathered_bytes(each) + layer.answering_summed_bytes for each in passes)

    return _faster(job, cluster, sizes)


_HOW: tuple[Exchange, ...] = ("keys", "latents")


def _faster(job: JobSpec, cluster: Cluster, sizes: Callable[[AttentionLayer], tuple[int, int, int]]) -> Exchange:
    """The job's choice; or what takes less time, by a token's bytes wide, as latents, and within a node for these."""
    chosen = job.parallelism.context.exchange
    if chosen != "auto":
        return chosen
    if len(cluster.levels) == 1 or cannot_send_latents(job.model, job.parallelism, job.training):
        return "keys"
    node, fabric = cluster.levels[0].link, cluster.levels[-1].link
    wide, latents, in_node = sizes(attention_layer(job))
    by_latents = latents / fabric.bytes_per_second + in_node / node.bytes_per_second
    return "latents" if by_latents < wide / fabric.bytes_per_second else "keys"
