"""Moved tasks whose queries and outputs travel as latents: r wide both ways, forward and backward.

A task has all keys of its queries, so its output o is final where it is computed, and all ranks of the group have the
layer's weights. So queries go as the latents that they are made from, and o A comes back, A being the weight that
turns the heads of one tensor parallel rank into its part of the output's latents. These parts are summed over the
node's tensor parallel ranks, a share per rank, and the owner puts its share into its own part, which its tensor
parallel group sums in any case. Backward, the gradients of the output's latents go and those of the queries' latents
come back, likewise as shares; the gathering and summing is as for keys' latents (``latents``).

Outputs, log-sum-exps and the shares of latents that came are kept where they were computed, which spares sending them
for the backward pass. The gradients of the weights are part of the sum over all ranks with these weights; there is one
per micro-batch even if no task moves: code that counts gradients finds the same number in each.

Shape suffixes: T tokens of the rank, m that come; r latents, p tensor parallel ranks, c = r/p; h heads, e head size.
"""

from collections.abc import Callable, Sequence

import torch

from boost_core.nn.attention import QueryLatents, Rotation, TaskMaker
from boost_core.parallel.context.latents import LatentRoute
from boost_core.parallel.context.moved import (
    Attended,
    Foreign,
    ForeignGradients,
    MovedRows,
    OutputGradients,
    OwnQueries,
    Returning,
    TaskGradients,
)
from boost_core.parallel.context.sums import AttentionSum, GradientSum
from boost_core.parallel.gradient_sinks import give_gradient


class MovedLatents:
    """The ``MovedTasks`` whose queries and outputs travel as latents.

    Args:
        rows: Their exchange.
        route: How latents travel.
        chunks: The chunks whose queries come to this rank, in order of arrival.
    """

    def __init__(self, rows: MovedRows, route: LatentRoute, chunks: Sequence[int]) -> None:
        self._rows, self._route = rows, route
        self._rotation = route.at(chunks) if chunks else None

    def ask(self, own: OwnQueries) -> Callable[[], Foreign]:
        """As in ``MovedTasks``."""
        made_of = _given(own.made_of)
        wait = self._rows.start("query latents", self._route.share(made_of.of_queries))

        def come() -> Foreign:
            (share_mc,) = wait()
            attention = AttentionSum.begin(self._queries(share_mc, own.query, made_of.maker))

            def answer(out_The: torch.Tensor, _: torch.Tensor) -> tuple[Sequence[torch.Tensor], Returning]:
                out_mhe = attention.out.to(out_The.dtype)
                returning = self._start_back(self._output_share(out_mhe, share_mc, made_of.maker))
                return (share_mc, out_mhe, attention.lse), returning

            return Foreign(attention, answer)

        return come

    def ask_for_gradients(
        self, own: OwnQueries, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], ForeignGradients]:
        """As in ``MovedTasks``."""
        made_of, (share_mc, out_mhe, lse_mh) = _given(own.made_of), attended.foreign
        wait, tokens = gradients.of_latents, len(own.query)
        if wait is None:
            raise AssertionError("with_returned comes between finish and the loss")

        def come() -> ForeignGradients:
            task = _Task(self._route, made_of.maker, self._rotation, share_mc, wait(), out_mhe)
            found = GradientSum.begin(task.query, task.dout, out_mhe, lse_mh)

            def answer(_: torch.Tensor) -> TaskGradients:
                dshare_mc, of_weights = task.gradients(found.dquery.to(out_mhe.dtype))
                put = self._rows.start_back("query latent gradients", dshare_mc)

                def of_latents() -> torch.Tensor:
                    share_Tc = dshare_mc.new_zeros(tokens, dshare_mc.shape[1])
                    put(share_Tc)
                    return self._route.in_place(share_Tc, 1)[0]

                return TaskGradients(of_latents, of_weights)

            return ForeignGradients(found, answer)

        return come

    def _queries(self, share_mc: torch.Tensor, query_The: torch.Tensor, maker: TaskMaker) -> torch.Tensor:
        """The queries that come, ``[m, h, e]``."""
        if self._rotation is None:
            return query_The.new_empty(0, *query_The.shape[1:])
        (latent_mr,) = self._route.gathered(share_mc, 1, "query latents")
        return maker.make(latent_mr, [weight.detach() for weight in maker.weights], self._rotation)

    def _output_share(self, out_mhe: torch.Tensor, share_mc: torch.Tensor, maker: TaskMaker) -> torch.Tensor:
        """This rank's share of the latents of outputs computed here, ``[m, c]``."""
        if self._rotation is None:
            return share_mc.new_empty(share_mc.shape)
        return self._route.scattered([out_mhe.flatten(1) @ maker.down.detach()], "output latents")

    def _start_back(self, share_mc: torch.Tensor) -> Returning:
        put = self._rows.start_back("output latents", share_mc)

        def start_gradients(dlatent_Tr: torch.Tensor) -> Callable[[], torch.Tensor]:
            wait = self._rows.start("output latent gradients", self._route.columns(dlatent_Tr))
            return lambda: wait()[0]

        return Returning(lambda latent_Tr: put(self._route.columns(latent_Tr)), start_gradients)


class _Task:
    """Queries that have come, and the gradient of their output, from latents and their gradients.

    Args:
        route: How latents travel.
        maker: What to make of them.
        rotation: The rotation of the queries' tokens; ``None`` if none have come.
        share_mc: This rank's share of the queries' latents.
        dshare_mc: That of the gradients of the output's.
        out_mhe: The output.

    Attributes:
        query: The queries, ``[m, h, e]``.
        dout: The gradient of the output.
    """

    def __init__(
        self, route: LatentRoute, maker: TaskMaker, rotation: Rotation | None, share_mc: torch.Tensor,
        dshare_mc: torch.Tensor, out_mhe: torch.Tensor,
    ) -> None:  # fmt: skip
        self._route, self._maker, self._share, self._has_come = route, maker, share_mc, rotation is not None
        if rotation is None:
            self.query = self.dout = out_mhe
            return
        both_mc = torch.cat((share_mc, dshare_mc), dim=1)
        latent_mr, dlatent_mr = route.gathered(both_mc, 2, "query latents and output latent gradients")
        self._inputs = [x.detach().requires_grad_() for x in (latent_mr, *maker.weights)]
        with torch.enable_grad():
            self._made = maker.make(self._inputs[0], self._inputs[1:], rotation)
        self.query = self._made.detach()
        self.dout = (dlatent_mr @ maker.down.detach().mT).view(out_mhe.shape)
        self._ddown = out_mhe.flatten(1).mT @ dlatent_mr

    def gradients(self, dquery_mhe: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """This rank's share of the gradients of the queries' latents, and the weights' gradients; to be called once."""
        if not self._has_come:
            return self._share, no_gradients(self._maker)
        dlatent_mr, *of_weights = torch.autograd.grad(self._made, self._inputs, dquery_mhe)
        return self._route.scattered([dlatent_mr], "query latent gradients"), [*of_weights, self._ddown]


def no_gradients(maker: TaskMaker) -> Sequence[torch.Tensor]:
    """Zeros for its weights, ``down`` last."""
    return [torch.zeros_like(weight) for weight in (*maker.weights, maker.down)]


def give_weights(gradients: Sequence[torch.Tensor], maker: TaskMaker) -> None:
    """Pass on the gradients of a maker's weights, ``down`` last."""
    for weight, gradient in zip((*maker.weights, maker.down), gradients, strict=True):
        give_gradient(weight, gradient)


def _given(of_queries: QueryLatents | None) -> QueryLatents:
    if of_queries is None:
        raise AssertionError("start gets what queries are made from where moves_latents says so")
    return of_queries
