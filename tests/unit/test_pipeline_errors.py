"""What a stage of a pipeline raises says how the job goes on, although torch has words of its own for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.parallel.communicator import CommunicationLedger, StepClock
from boost_core.parallel.pipeline import _CountedStage
from boost_core.train import release_broken_step
from service.gang.assignment import End
from service.gang.worker.worker import end_of

CPU = torch.device("cpu")


class Breaking(torch.nn.Module):
    """A stage that fails in its forward or in its backward pass."""

    stage = SimpleNamespace(index=0, first=True, last=True)

    def __init__(self, error: Exception, when: str) -> None:
        super().__init__()
        self._error, self._when, self.weight = error, when, torch.nn.Parameter(torch.ones(2))

    def shapes(self, tokens: int) -> Any:
        return [(tokens,)], [(tokens,)]

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        out = self.weight * 2
        if self._when == "forward":
            self._break()
        out.register_hook(self._break)
        return out

    def _break(self, *_: Any) -> None:
        raise self._error


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    ("error", "how"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), End.FAILED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), End.DEVICE),
        (dist.DistError("its collectives were aborted"), End.CONNECTION),
        (ValueError("give a path"), End.LASTING),
    ],
)
def test_what_a_stage_raises_is_what_the_step_raises(error: Exception, how: End, when: str) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        ledger = CommunicationLedger()
        stage = _CountedStage(
            Breaking(error, when), 1, 2, dist.group.WORLD, ledger, StepClock(ledger, CPU), None, torch.float32, CPU,
        )  # fmt: skip
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out - target).sum())
        with pytest.raises(type(error)) as raised:
            schedule.step(torch.ones(4, dtype=torch.int64), target=torch.zeros(4))
        assert raised.value is error and end_of(raised.value).how is how
        release_broken_step(raised.value)  # follows the chain of causes, which has an end
    finally:
        dist.destroy_process_group()
