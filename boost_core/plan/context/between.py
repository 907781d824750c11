"""What context parallel ranks send each other: keys and values, or the latents from which these are computed."""

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
    chosen = job.parallelism.context.exchange
    if chosen != "auto":
        return chosen
    if len(cluster.levels) == 1 or cannot_send_latents(job.model, job.parallelism, job.training):
        return "keys"
    layer, node, fabric = attention_layer(job), cluster.levels[0].link, cluster.levels[-1].link
    latents = layer.latent_bytes / fabric.bytes_per_second + layer.gathered_bytes / node.bytes_per_second
    return "latents" if latents < layer.key_bytes / fabric.bytes_per_second else "keys"
