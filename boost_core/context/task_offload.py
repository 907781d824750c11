"""Attention task offloading: queries go to where their attention is computed, and the outputs come back.

A task has all keys of its queries, so what comes back is final and takes its place among the rank's own outputs.
In ``MovedQueries`` nothing is saved where it was computed: in the backward pass the queries go again, with the output,
its log-sum-exps and its gradient, and the gradient of the queries comes back. Those of keys go to their owners like any
others.

In ``MovedLatents`` queries and outputs travel as latents: r wide both ways, forward and backward. An output o is final
where it is computed, and all ranks of the group have the layer's weights. So queries go as the latents that they are
made from, and o A comes back, A being the weight that turns the heads of one tensor parallel rank into its part of the
output's latents. These parts are summed over the node's tensor parallel ranks, a share per rank, and the owner puts its
share into its own part, which its tensor parallel group sums in any case. Backward, the gradients of the output's
latents go and those of the queries' latents come back, likewise as shares; the gathering and summing is as for keys'
latents (``exchange``).

Outputs, log-sum-exps and the shares of latents received are then saved where they were computed, which spares sending
them for the backward pass. The gradients of the weights are part of the sum over all ranks with these weights; there is
one per micro-batch even if no task moves: code that counts gradients finds the same number in each.

Shape suffixes: T tokens of the rank, n sent, m received; h heads, e head size; x any values of a token; r latents, p
tensor parallel ranks, c = r/p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from boost_core.context.exchange import (
    AttentionSum,
    GradientSum,
    LatentRoute,
    QueryLatents,
    integers,
    start_rows,
)
from boost_core.context.plan import Traffic
from boost_core.model.attention import Rotation
from boost_core.parallel.communicator import Communicator


class Attended(NamedTuple):
    """What a layer saves of its attention for the backward pass.

    Attributes:
        out: The output of the rank's own queries, ``[T, h, e]``; zeros where another rank has it.
        lse: Its log-sum-exps, ``[T, h]``.
        remote: What is saved of other ranks' tasks.
    """

    out: torch.Tensor
    lse: torch.Tensor
    remote: Sequence[torch.Tensor] = ()


class OutputGradients(NamedTuple):
    """Gradients of attention's output.

    Attributes:
        dout: Those of this rank's queries, ``[T, h, e]``.
        of_latents: Waits for those of the latents of other ranks' outputs, ``[m, c]``, alone in a sequence; ``None``
            unless latents travel.
    """

    dout: torch.Tensor
    of_latents: Callable[[], Sequence[torch.Tensor]] | None = None


class Returning(NamedTuple):
    """Latents of outputs that come back.

    Attributes:
        put: Waits for them, and puts them among those of this rank's tokens, ``[T, r]``.
        start_gradients: Starts to send these latents' gradients to where the outputs were computed; what it returns
            waits for those that come, ``[m, c]``, alone in a sequence.
    """

    put: Callable[[torch.Tensor], None]
    start_gradients: Callable[[torch.Tensor], Callable[[], Sequence[torch.Tensor]]]


class RemoteQueries(NamedTuple):
    """Other ranks' queries.

    Attributes:
        attention: Their attention so far.
        respond: Sends back what was computed, given this rank's own output and log-sum-exps, and puts into these what
            comes back, or starts to return latents; returns what to save.
    """

    attention: AttentionSum
    respond: Callable[[torch.Tensor, torch.Tensor], tuple[Sequence[torch.Tensor], Returning | None]]


class TaskGradients(NamedTuple):
    """Gradients of what offloaded tasks are computed from, if latents travel.

    Attributes:
        of_latents: Waits for those of the latents of this rank's own queries, and returns them, ``[T, r]``.
        of_weights: Those of a ``TaskMaker``'s weights, ``down`` last, from other ranks' tasks.
    """

    of_latents: Callable[[], torch.Tensor]
    of_weights: Sequence[torch.Tensor]


class RemoteGradients(NamedTuple):
    """Other ranks' queries in the backward pass.

    Attributes:
        gradients: Their gradients so far.
        respond: Sends them back, and puts what comes back into the gradients of this rank's own queries, or starts to
            return those of latents.
    """

    gradients: GradientSum
    respond: Callable[[torch.Tensor], TaskGradients | None]


class MovedRows:
    """The exchange of tokens' values between those who have them and those who compute their attention.

    Args:
        traffic: What goes where; what comes stays in its order of arrival.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        device: Where the tokens are.
    """

    def __init__(self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._goes = [len(chunks) * chunk_tokens for chunks in traffic.sends]
        self._comes = [count * chunk_tokens for count in traffic.receives]
        first_n = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device) * chunk_tokens
        self._places_n = (first_n.unsqueeze(1) + torch.arange(chunk_tokens, device=device)).flatten()

    def start(self, purpose: str, *local_Tx: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send values of moved tokens; the returned function waits, and returns those of tokens that come.

        Args:
            purpose: The purpose, for the ledger.
            local_Tx: Values of this rank's tokens, of any types; they are sent as the first one's type.
        """
        payload = _packed([x.index_select(0, self._places_n) for x in local_Tx])
        wait = start_rows(self._communicator, payload, self._goes, self._comes, purpose)
        return lambda: _unpacked(wait(), local_Tx)

    def start_back(self, purpose: str, *came_mx: torch.Tensor) -> Callable[..., None]:
        """Start to return what was computed for others; the returned function waits, and puts in place what comes back.

        Args:
            purpose: The purpose, for the ledger.
            came_mx: Results for the tokens that have come. What the returned function is called with are tensors of the
                same types for this rank's own tokens.
        """
        wait = start_rows(self._communicator, _packed(came_mx), self._comes, self._goes, purpose)

        def put(*local_Tx: torch.Tensor) -> None:
            for local, part_nx in zip(local_Tx, _unpacked(wait(), local_Tx), strict=True):
                local.index_copy_(0, self._places_n, part_nx)

        return put


@dataclass(frozen=True)
class MovedQueries:
    """The tasks that ranks compute for each other by one plan; queries and outputs travel as they are.

    Attributes:
        rows: Their exchange.
    """

    rows: MovedRows

    def request(self, query_The: torch.Tensor, _made_of: QueryLatents | None) -> Callable[[], RemoteQueries]:
        """Start to send queries, or latents that they are made from; the returned function waits for other ranks'."""
        wait = self.rows.start("queries", query_The)

        def come() -> RemoteQueries:
            attention = AttentionSum(*wait())

            def respond(out_The: torch.Tensor, lse_Th: torch.Tensor) -> tuple[Sequence[torch.Tensor], None]:
                self.rows.start_back("outputs", attention.out.to(out_The.dtype), attention.lse)(out_The, lse_Th)
                return (), None

            return RemoteQueries(attention, respond)

        return come

    def request_gradients(
        self, query_The: torch.Tensor, _made_of: QueryLatents | None, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], RemoteGradients]:
        """Start to send what gradients take; the returned function waits for what other ranks send."""
        sent = query_The, gradients.dout, attended.out, attended.lse
        wait = self.rows.start("queries and output gradients", *sent)

        def come() -> RemoteGradients:
            sums = GradientSum(*wait())
            return RemoteGradients(
                sums, lambda dq_The: self.rows.start_back("query gradients", sums.dquery.to(dq_The.dtype))(dq_The)
            )

        return come


def _packed(parts_nx: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per token, viewed as the first one's type, bit for bit."""
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).view(parts_nx[0].dtype) for x in parts_nx], dim=1)


def _unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    widths = [prod(x.shape[1:]) * x.element_size() // rows.element_size() for x in like]
    parts = zip(rows.split_with_sizes(widths, dim=1), like, strict=True)
    return [part.contiguous().view(x.dtype).view(len(rows), *x.shape[1:]) for part, x in parts]


@dataclass(frozen=True)
class MovedLatents:
    """The same, but queries and outputs travel as latents.

    Attributes:
        rows: Their exchange.
        route: How latents travel.
        rotation: Of the tokens whose queries come to this rank, in order of arrival; ``None`` if none do.
    """

    rows: MovedRows
    route: LatentRoute
    rotation: Rotation | None

    def request(self, query_The: torch.Tensor, made_of: QueryLatents | None) -> Callable[[], RemoteQueries]:
        """As in ``MovedQueries``."""
        assert made_of is not None, "start gets what queries are made from where moves_latents says so"
        wait = self.rows.start("query latents", self.route.columns(made_of.of_queries))

        def come() -> RemoteQueries:
            (share_mc,) = wait()
            maker, rotation, route = made_of.maker, self.rotation, self.route
            query_mhe = query_The.new_empty(0, *query_The.shape[1:])
            if rotation is not None:
                (latent_mr,) = route.gathered(share_mc, 1, "query latents")
                query_mhe = maker.make(latent_mr, [weight.detach() for weight in maker.weights], rotation)
            attention = AttentionSum(query_mhe)

            def respond(out_The: torch.Tensor, _: torch.Tensor) -> tuple[Sequence[torch.Tensor], Returning]:
                out_mhe = attention.out.to(out_The.dtype)
                out_share_mc = share_mc.new_empty(share_mc.shape)  # of no tokens
                if rotation is not None:
                    out_share_mc = route.scattered([out_mhe.flatten(1) @ maker.down.detach()], "output latents")
                put = self.rows.start_back("output latents", out_share_mc)

                returning = Returning(
                    lambda latent_Tr: put(route.columns(latent_Tr)),
                    lambda dlatent_Tr: self.rows.start("output latent gradients", route.columns(dlatent_Tr)),
                )
                return (share_mc, out_mhe, attention.lse), returning

            return RemoteQueries(attention, respond)

        return come

    def request_gradients(
        self, query_The: torch.Tensor, made_of: QueryLatents | None, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], RemoteGradients]:
        """As in ``MovedQueries``; what gradients take is in flight already, or saved where it was computed."""
        assert made_of is not None, "start gets what queries are made from where moves_latents says so"
        maker, (share_mc, out_mhe, lse_mh) = made_of.maker, attended.remote
        weights = *maker.weights, maker.down
        wait, tokens, route, rotation = gradients.of_latents, len(query_The), self.route, self.rotation
        if wait is None:
            raise AssertionError("with_returned comes between finish and the loss")

        def come() -> RemoteGradients:
            (dshare_mc,) = wait()
            # Queries, and the gradient of their output, from latents and their gradients; or of no tokens.
            query_mhe = dout_mhe = out_mhe
            graph: tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor] | None = None
            if rotation is not None:
                both_mc = torch.cat((share_mc, dshare_mc), dim=1)
                latent_mr, dlatent_mr = route.gathered(both_mc, 2, "query latents and output latent gradients")
                inputs = [x.detach().requires_grad_() for x in (latent_mr, *maker.weights)]
                with torch.enable_grad():
                    with_history_mhe = maker.make(inputs[0], inputs[1:], rotation)
                query_mhe = with_history_mhe.detach()
                dout_mhe = (dlatent_mr @ maker.down.detach().mT).view(out_mhe.shape)
                graph = with_history_mhe, inputs, out_mhe.flatten(1).mT @ dlatent_mr
            gradient_sum = GradientSum(query_mhe, dout_mhe, out_mhe, lse_mh)

            def respond(_: torch.Tensor) -> TaskGradients:
                if graph is None:
                    dquery_share_mc, of_weights = share_mc, [torch.zeros_like(weight) for weight in weights]
                else:
                    with_history_mhe, inputs, ddown = graph
                    dquery_mhe = gradient_sum.dquery.to(out_mhe.dtype)
                    dquery_latent_mr, *dweights = torch.autograd.grad(with_history_mhe, inputs, dquery_mhe)
                    dquery_share_mc = route.scattered([dquery_latent_mr], "query latent gradients")
                    of_weights = [*dweights, ddown]
                put = self.rows.start_back("query latent gradients", dquery_share_mc)

                def of_latents() -> torch.Tensor:
                    share_Tc = dquery_share_mc.new_zeros(tokens, dquery_share_mc.shape[1])
                    put(share_Tc)
                    return route.in_place(share_Tc, 1)[0]

                return TaskGradients(of_latents, of_weights)

            return RemoteGradients(gradient_sum, respond)

        return come
