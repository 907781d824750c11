"""Attention over context parallel ranks as one layer's part of autograd's graph.

Two nodes: ``_Start`` sends keys; ``_Finish`` waits for them and attends. Backward, ``_Finish`` computes all gradients,
and ``_Start`` waits for the last of those that return. Where micro-batches are split, the other half computes between
the two, forward and backward: all stages are then in flight at once, and keys are sent again as soon as the backward
pass reaches the block.

If the outputs of moved tasks come back as latents, a third node, ``_Returned``, puts these among the latents of the
rank's own outputs; backward, it sends their gradients.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; r latents.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from boost_core.nn.attention import KeyLatents, KeyMaker, QueryLatents, TaskMaker
from boost_core.nn.overlap import in_recompute
from boost_core.parallel.context.moved import Attended, OutputGradients, Returning, TaskGradients
from boost_core.parallel.context.moved_latents import give_weights, no_gradients
from boost_core.parallel.context.stage import Own

if TYPE_CHECKING:
    from boost_core.parallel.context.attention import ContextAttention, InFlight


class LayerAttention:
    """Attention of one layer, as ``nn.attention.DealtAttention`` says.

    Args:
        attention: That of all layers.

    Attributes:
        attention: As given.
    """

    def __init__(self, attention: "ContextAttention") -> None:
        self.attention = attention
        self._in_flight: InFlight | None = None
        self._returning: Returning | None = None

    @property
    def sends_latents(self) -> bool:
        """Whether ``start`` needs what keys and values are made from."""
        return self.attention.sends_latents

    @property
    def moves_latents(self) -> bool:
        """Whether ``start`` needs what queries are made from."""
        return self.attention.moves_latents

    def for_layer(self) -> "LayerAttention":
        """Return one for another layer, which has its own exchange in flight."""
        return self.attention.for_layer()

    def start(
        self,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        latents: KeyLatents | None = None,
        of_queries: QueryLatents | None = None,
    ) -> torch.Tensor:
        """Start to exchange keys; returns the queries. All ranks of the group call it.

        Args:
            query_The: Queries of this rank's tokens, turned by their positions, as keys are; h is a multiple of j.
            key_Tje: Their keys.
            value_Tje: Their values.
            latents: The latents of keys and values, if latents are sent.
            of_queries: The latents of queries, if those of moved tasks are sent.

        Raises:
            ValueError: The number of tokens is not the plan's.
        """
        if len(query_The) != self.attention.tokens:
            raise ValueError(
                f"{len(query_The)} tokens are not the {self.attention.tokens} that the plan has on this rank"
            )
        maker, sent = (latents.maker, [latents.of_keys, latents.of_values]) if latents else (None, [])
        task_maker, moved = (of_queries.maker, [of_queries.of_queries]) if of_queries else (None, [])
        return _Start.apply(query_The, key_Tje, value_Tje, self, maker, task_maker, *sent, *moved)  # type: ignore[no-any-return, no-untyped-call]

    def finish(self, query_The: torch.Tensor) -> torch.Tensor:
        """Attention, ``[T, h, e]``, of the queries that ``start`` has returned. All ranks of the group call it.

        Raises:
            ValueError: torch has no kernel for them.
        """
        return _Finish.apply(query_The, self)  # type: ignore[no-any-return, no-untyped-call]

    def with_returned(self, query_The: torch.Tensor, latent_Tr: torch.Tensor) -> torch.Tensor:
        """Put latents of outputs that other ranks have computed into this rank's part, in place, after ``finish``.

        Args:
            query_The: What ``start`` has returned.
            latent_Tr: This rank's part of the output's latents.
        """
        returning, self._returning = self._returning, None
        if returning is None:
            return latent_Tr
        return _Returned.apply(latent_Tr, query_The, returning)  # type: ignore[no-any-return, no-untyped-call]

    def send_ahead_of(self, query_The: torch.Tensor, stream_Td: torch.Tensor) -> None:
        """Let the backward pass of a half send keys again once it has the gradient of ``stream_Td``."""
        started = query_The.grad_fn
        if self.attention.of_a_half and started is not None:
            stream_Td.register_hook(lambda _: _send_again(started))  # type: ignore[no-untyped-call]

    def begin(self, query_The: torch.Tensor, own: Own) -> None:
        """Start what ``attended`` needs."""
        self._in_flight = self.attention.start(query_The, own)

    def attended(self, query_The: torch.Tensor) -> Attended:
        """The output, ``[T, h, e]``, and its log-sum-exps, ``[T, h]``, once for each ``begin``."""
        if self._in_flight is None:
            raise AssertionError("start comes before finish")
        in_flight, self._in_flight = self._in_flight, None
        attended, self._returning = self.attention.forward(query_The, in_flight)
        return attended


class _Start(torch.autograd.Function):
    """Forward, keys leave; backward, their gradients have come back."""

    @staticmethod
    def forward(
        ctx: Any,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        layer: LayerAttention,
        maker: KeyMaker | None,
        task_maker: TaskMaker | None,
        *latents_Tr: torch.Tensor,
    ) -> torch.Tensor:
        keys_Tsje = torch.stack((key_Tje, value_Tje), dim=1)
        # Kernels take a head's elements side by side; and a view would keep the keys' and values' memory, too.
        query_The = query_The.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(query_The, keys_Tsje, *latents_Tr)
        ctx.attention, ctx.maker, ctx.task_maker = layer.attention, maker, task_maker
        ctx.again, ctx.dlatent, ctx.returning = None, None, None
        if not in_recompute():
            layer.begin(query_The, layer.attention.own(keys_Tsje, maker, task_maker, latents_Tr, backward=False))
        return query_The

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_own, of_tasks, dtype = ctx.returning.whole(), ctx.returning.of_tasks, gradients[0].dtype
        ctx.returning = None
        of_latents = ctx.attention.gradients_of_latents(of_own, ctx.maker, dtype)
        of_queries = _gradients_of_queries(of_tasks, ctx.task_maker)
        return gradients[0], *of_own.keys.to(dtype).unbind(1), None, None, None, *of_latents, *of_queries


class _Finish(torch.autograd.Function):
    """Attention, forward and backward, between the two."""

    @staticmethod
    def forward(ctx: Any, query_The: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        attended = layer.attended(query_The)
        ctx.save_for_backward(attended.out, attended.lse, *attended.foreign)
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out_The, lse_Th, *foreign = ctx.saved_tensors
        started = ctx.next_functions[0][0]
        _send_again(started)
        (query_The, keys), started.again = started.again, None
        dlatent, started.dlatent = started.dlatent, None
        of_outputs = OutputGradients(gradients[0].contiguous(), dlatent)
        attended = Attended(out_The, lse_Th, foreign)
        dquery_The, started.returning = started.attention.backward(of_outputs, query_The, keys, attended)
        return dquery_The, None


class _Returned(torch.autograd.Function):
    """Forward, latents of outputs come back; backward, their gradients leave before attention's are computed."""

    @staticmethod
    def forward(ctx: Any, latent_Tr: torch.Tensor, query_The: torch.Tensor, returning: Returning) -> torch.Tensor:
        ctx.mark_dirty(latent_Tr)
        returning.put(latent_Tr)
        ctx.start_gradients = returning.start_gradients
        return latent_Tr

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = ctx.next_functions[1][0]
        started.dlatent = ctx.start_gradients(gradients[0])
        return gradients[0], None, None


def _send_again(started: Any) -> None:
    """Send what ``_Start`` has sent once more, for the backward pass, unless that is done; keeps it with its queries.

    Args:
        started: The node of ``_Start``, which alone has the queries and keys, or has them recomputed.
    """
    if started.again is None:
        query_The, keys_Tsje, *latents_Tr = started.saved_tensors
        own = started.attention.own(keys_Tsje, started.maker, started.task_maker, latents_Tr, backward=True)
        started.again = query_The, started.attention.send(own)


def _gradients_of_queries(of_tasks: TaskGradients | None, maker: TaskMaker | None) -> Sequence[torch.Tensor | None]:
    """The gradient of the queries' latents, if these travel; those of the weights are passed on."""
    if maker is None:
        return ()
    give_weights(of_tasks.of_weights if of_tasks else no_gradients(maker), maker)
    return (of_tasks.of_latents() if of_tasks else None,)
