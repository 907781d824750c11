"""What a context parallel plan sends in the forward pass of a layer, to hold what ranks have sent to it."""

from typing import NamedTuple

from boost_core.context.plan import AttentionLayer, ContextPlan, Exchange


class Sent(NamedTuple):
    """Bytes of keys, moved queries and their results, over all ranks.

    Attributes:
        node_bytes: Those that stay within nodes.
        fabric_bytes: Those between nodes.
    """

    node_bytes: int
    fabric_bytes: int


def sent_by(
    plan: ContextPlan, layer: AttentionLayer, exchange: Exchange = "keys", node_ranks: int = 1, moved: Exchange = "keys"
) -> Sent:
    """What a plan sends; arguments as of ``figures``."""
    size = plan.window.chunk_tokens
    a_query = size * sum(layer.moved_bytes(backward=False, moved=moved))
    keys, queries = (
        sum(each.sender // node_ranks != each.receiver // node_ranks for each in transfers)
        for transfers in (plan.keys, plan.queries)
    )
    within = (len(plan.keys) - keys) * size * layer.key_bytes + (len(plan.queries) - queries) * a_query
    return Sent(within, keys * size * layer.sent_bytes(exchange) + queries * a_query)
