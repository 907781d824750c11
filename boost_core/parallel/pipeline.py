"""Pipeline parallelism: torch's schedules over stages that count what they send."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from boost_core.model.attention import Rotation
from boost_core.model.decoder import StageModule
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry, Part, StepClock

# torch's names of our schedules.
_SCHEDULES = {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble"}


class Pipeline:
    """This pipeline rank's stages.

    Args:
        parts: The stages, in order.
        count: Number of stages over all ranks.
        schedule: ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        micro_batches: Number of micro-batches per step.
        tokens: Number of this rank's tokens per micro-batch.
        ranks: The pipeline parallel group.
        group: The same group, as torch's.
        ledger: Counts what is sent.
        clock: Told when stages run forward and backward.
        weight_gradients: Returns what computes a backward pass's deferred weight gradients; for ``zero_bubble``.
        dtype: Type of the residual stream.
        device: Where the residual stream lives.
    """

    def __init__(
        self, parts: Sequence[StageModule], count: int, schedule: str, micro_batches: int, tokens: int,
        ranks: Communicator, group: dist.ProcessGroup,
        ledger: CommunicationLedger, clock: StepClock, weight_gradients: Callable[[], Callable[[], None]] | None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._parts, self._ranks, self._dtype, self._device = parts, ranks, dtype, device
        self._numbers = torch.arange(micro_batches)  # on the host, which reads them
        of_all = count, tokens, group, ledger, clock, weight_gradients, dtype, device
        stages = [_CountedStage(part, *of_all) for part in parts]
        self._schedule: Any = get_schedule_class(_SCHEDULES[schedule])(
            stages[0] if schedule == "1f1b" else stages, micro_batches,
            loss_fn=lambda losses_T, weight_T: (losses_T * weight_T).sum(), scale_grads=False,
        )  # fmt: skip

    def train(
        self, token_N: torch.Tensor, target_N: torch.Tensor, weight_N: torch.Tensor, rotations: Sequence[Rotation]
    ) -> torch.Tensor:
        """Run all micro-batches of a step, which follow each other in ``[N]``, forward and backward.

        Args:
            token_N: This rank's tokens.
            target_N: The token after each.
            weight_N: The weight of each loss.
            rotations: The positions of each micro-batch's tokens, and how they attend.

        Returns:
            The weighted sum of losses, one float64 element; 0 on ranks that do not have the last stage.
        """
        inputs = (token_N,) if self._parts[0].stage.first else ()
        losses: list[torch.Tensor] = []
        of_last: dict[str, Any] = {}
        if self._parts[-1].stage.last:
            of_last = {"target": weight_N, "losses": losses, "target_T": target_N}
        with self._at(rotations):
            self._schedule.step(*inputs, return_outputs=False, number_1=self._numbers, **of_last)
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return sum((loss.detach().double() for loss in losses), zero)

    def losses(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor | None:
        """Losses of tokens without a backward pass; ``None`` on ranks that do not have the last stage."""
        result = None
        with self._at([rotation]):
            for part in self._parts:
                before, inputs = (self._ranks.rank - 1) % self._ranks.size, [token_T]
                if not part.stage.first:
                    shapes, _ = part.shapes(len(token_T))
                    incoming = [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]
                    inputs = [self._ranks.receive(each, before) for each in incoming]
                result = part(*inputs, number_1=self._numbers[:1], target_T=target_T)
                if not part.stage.last:
                    after = (self._ranks.rank + 1) % self._ranks.size
                    for sent in [self._ranks.send(each.contiguous(), after, "residual") for each in result]:
                        sent.wait()
        return result if self._parts[-1].stage.last else None

    @contextmanager
    def _at(self, rotations: Sequence[Rotation]) -> Iterator[None]:
        """Have the stages use these rotations; they drop them afterwards, as rotations hold memory."""
        for part in self._parts:
            part.rotations = rotations
        try:
            yield
        finally:
            for part in self._parts:
                part.rotations = ()


def _as_raised(run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a stage. Torch hides what it raises, which says how the job goes on, behind an error of its own."""
    try:
        return run(*arguments, **named)
    except RuntimeError as error:
        if type(error) is not RuntimeError or error.__cause__ is None:
            raise
        raised = error.__cause__
    raise raised  # not while the other is handled: each would refer to the other, and their chain would have no end


class _CountedStage(PipelineStage):
    """torch's stage; the ledger counts what it sends but not the time, which the schedule spends between stages."""

    def __init__(
        self, part: StageModule, count: int, tokens: int, group: dist.ProcessGroup, ledger: CommunicationLedger,
        clock: StepClock, weight_gradients: Callable[[], Callable[[], None]] | None, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        inputs, outputs = part.shapes(tokens)
        taken = torch.int64 if part.stage.first else dtype
        returned = torch.promote_types(dtype, torch.float32) if part.stage.last else dtype
        like_inputs, like_outputs = (
            tuple(torch.empty(size, dtype=of, device=device, requires_grad=of.is_floating_point) for size in shapes)
            for shapes, of in ((inputs, taken), (outputs, returned))
        )
        super().__init__(
            part, part.stage.index, count, device, like_inputs, like_outputs, group=group, dw_builder=weight_gradients
        )
        self._ledger, self._clock = ledger, clock
        self._inputs, self._outputs = (
            [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes] for shapes in (inputs, outputs)
        )

    # torch gives a stage a buffer for the input, and one for the output's gradient, of every micro-batch of a step.
    # Here each has memory only from when its transfer is posted until its backward pass is done.

    def _prepare_forward_infra(self, num_microbatches: int, *arguments: Any, **named: Any) -> Any:
        result = super()._prepare_forward_infra(1, *arguments, **named)
        self._describe(self.args_recv_info, [] if self.is_first else self._inputs, num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *arguments: Any, **named: Any) -> Any:
        result = super()._prepare_backward_infra(1, *arguments, **named)
        self.chunks = num_microbatches
        self._describe(self.grad_recv_info, [] if self.is_last else self._outputs, num_microbatches)
        return result

    @staticmethod
    def _describe(received: dict[int, tuple[Any, ...]], like: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Let all micro-batches be received as the first, into nothing yet."""
        for info, tensor in zip(received[0], like, strict=False):  # none of what comes from outside
            info.buffer = tensor
        received.update((number, tuple(map(copy, received[0]))) for number in range(1, micro_batches))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            for info, like in zip(self.args_recv_info[fwd_chunk_id], self._inputs, strict=True):
                info.buffer = torch.empty_like(like, device=self.device, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            for info, like in zip(self.grad_recv_info[bwd_chunk_id], self._outputs, strict=True):
                info.buffer = torch.empty_like(like, device=self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self._clock.during(Part.FORWARD):
            return _as_raised(super().forward_one_chunk, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._clock.during(Part.BACKWARD):
            result = _as_raised(super().backward_one_chunk, bwd_chunk_id, *arguments, **named)
        received = () if self.is_first else zip(self.args_recv_info[bwd_chunk_id], self._inputs, strict=True)
        returned = () if self.is_last else zip(self.grad_recv_info[bwd_chunk_id], self._outputs, strict=True)
        for info, like in (*received, *returned):
            info.buffer = like
        return result

    def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self._clock.during(Part.BACKWARD):
            return super().backward_weight_one_chunk(*arguments, **named)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_fwd_send_ops(fwd_chunk_id), "residual")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), "residual gradient")

    def _packed(self, operations: list[dist.P2POp], purpose: str) -> list[dist.P2POp]:
        """Count what is sent, and make each tensor contiguous, which crossing latents need not be."""
        for operation in operations:
            operation.tensor = operation.tensor.contiguous()
            self._ledger.count(Entry("send", "pp", purpose), operation.tensor)
        return operations
