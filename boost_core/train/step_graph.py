"""The device's work of a step as a CUDA graph: captured once, then replayed without the host's part in it.

The graph covers everything from the batch at hand to the step's single read-back: forward and backward of every
micro-batch, their collectives, the gradients' sums over replicas and their norm. The update comes after that
read-back, which decides whether there is one, and is a few launches. (Megatron-Core's full-iteration graphs leave the
optimizer out, too.)

Each timed event is a node of the graph, and there are three for each collective. So the work is captured twice, with
events and without, in the same memory, and only every ``TIMED_EVERY``-th step is replayed with them.

NCCL wants all ranks of a collective to capture it or none, so ranks agree after they have tried. A graph lives as
long as the state of one gang: after a resize the new gang's state captures its own.
"""

import logging
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch

from boost_core.config import JobSpec
from boost_core.parallel.communicator import CommunicationLedger, Part, Recording, StepClock
from boost_core.plan.machine import attends_on_device

logger = logging.getLogger(__name__)

# The first compiles kernels, creates communicators and learns the gradients' order; the second sends in that order.
WARM_STEPS = 2
TIMED_EVERY = 10  # replayed steps

Results = tuple[torch.Tensor, torch.Tensor]  # the values read from a step's work, and what its update needs
Work = Callable[[], Results]  # enqueues a step's work


class CudaGraph:
    """Torch's graph, with a stream of its own, because the default stream cannot be captured."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._memory: Any = None  # by default its own
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def beside(self) -> "CudaGraph":
        """Return another for the same work in the same memory, once this one is captured; replay one at a time."""
        other = copy(self)
        other._graph, other._memory = torch.cuda.CUDAGraph(), self._graph.pool()
        return other

    def warm(self, work: Work) -> Results:
        """Do the work on the stream on which it will be captured, as libraries keep memory for each stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            values = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return values

    def capture(self, work: Work) -> Results:
        """Record the work; its results are there after each ``replay``."""
        # Meanwhile other threads, which copy checkpoints and watch NCCL, may do what no capture allows.
        with torch.cuda.graph(self._graph, self._memory, self._stream, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """Do the captured work, on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Release the graph and its memory; another may be captured then. The stream stays, already warm."""
        self._graph.reset()
        self._graph = torch.cuda.CUDAGraph()


class _Captured(NamedTuple):
    """A graph, its results after each replay, and what its collectives and the parts of its step are recorded with."""

    graph: CudaGraph
    values: Results
    collectives: Recording
    parts: list[tuple[Part, torch.cuda.Event]]


class StepGraph:
    """Does the work of steps: operation by operation at first, then as a graph, unless there is an obstacle.

    Args:
        obstacle: Why the work cannot be captured; ``None`` to try it.
        required: Whether it is an error if it cannot.
        clock: Told of the parts of a replayed step.
        ledger: Told of its collectives.
        all_agree: Returns whether all ranks say yes.
        abandon: Called after a failed capture, to discard what it left half done.

    Attributes:
        obstacle: As given, or found since.
    """

    def __init__(
        self, obstacle: str | None, required: bool, clock: StepClock, ledger: CommunicationLedger,
        all_agree: Callable[[bool], bool], abandon: Callable[[], None],
    ) -> None:  # fmt: skip
        self.obstacle, self._required = obstacle, required
        self._clock, self._ledger, self._all_agree, self._abandon = clock, ledger, all_agree, abandon
        self._graph = CudaGraph() if obstacle is None else None  # the one with events
        self._warm_steps = self._replayed = 0
        self._timed: _Captured | None = None
        self._untimed: _Captured | None = None  # the same as the timed one if it could not be captured
        self._failure: str | None = None

    def run(self, work: Work) -> Results:
        """Do a step's work and return its results. The work is the same every time, and reads the same memory.

        Raises:
            ValueError: It cannot be captured, although required; on all ranks.
        """
        if self._graph is None:
            raise AssertionError(self.obstacle)
        if self._warm_steps < WARM_STEPS:
            if self._warm_steps == 0:
                torch.cuda.empty_cache()  # what the start has freed belongs to another stream, and would not be used
            self._warm_steps += 1
            return self._graph.warm(work)
        if self._timed is None:
            captured, cause = self._capture(self._graph, work, timed=True)
            if captured is None:
                if self._required:
                    problem = f"training.cuda_graphs is on, but the step cannot be captured: {cause}"
                    raise ValueError(f"{problem}; set it to auto or off")
                self.release(cause)
                self._failure = f"steps are not captured as a CUDA graph: {cause}"
                logger.warning(self._failure)
                return work()
            logger.info("steps are replayed as a CUDA graph from now on")
            self._timed = captured
        elif self._untimed is None:
            captured, cause = self._capture(self._graph.beside(), work, timed=False)
            if captured is None:
                logger.info("each replayed step is timed, as there is no graph without events: %s", cause)
            self._untimed = captured or self._timed

        replayed = self._timed if self._untimed is None or self._replayed % TIMED_EVERY == 0 else self._untimed
        self._replayed += 1
        replayed.graph.replay()
        self._ledger.replay(self._timed.collectives)
        self._clock.replay(self._timed.parts, timed=replayed is self._timed)
        return replayed.values

    def _capture(self, graph: CudaGraph, work: Work, timed: bool) -> tuple[_Captured | None, str]:
        """Capture the work; or, if any rank cannot, return why, on all ranks."""
        cause: str | None = None
        with self._ledger.recorded(timed) as collectives, self._clock.recorded() as parts:
            try:
                values = graph.capture(work)
            except RuntimeError as error:  # as all of CUDA's are
                # Ending a broken capture fails as well, and hides the original error.
                first = error if error.__context__ is None else error.__context__
                cause = str(first).partition("\n")[0] or type(first).__name__
        if self._all_agree(cause is None):
            return _Captured(graph, values, collectives, parts), ""
        self._abandon()
        graph.reset()
        return None, cause or "another rank could not capture it"

    def failure(self) -> str | None:
        """Return why a capture has failed since the last call, if one has."""
        failure, self._failure = self._failure, None
        return failure

    def release(self, why: str) -> None:
        """Free a graph's memory. From now on steps run operation by operation."""
        self.forget()
        self.obstacle, self._graph = why, None

    def forget(self) -> None:
        """Free a graph's memory, if there is one. The next ``run`` captures again."""
        for graph in {captured.graph for captured in (self._timed, self._untimed) if captured is not None}:
            graph.reset()
        self._timed = self._untimed = None
        self._replayed = 0


def obstacle(spec: JobSpec, device: torch.device) -> str | None:
    """Return why a job's steps cannot be captured, as far as its spec tells; ``None`` if it is worth trying."""
    training, parallelism, on_device = spec.training, spec.parallelism, attends_on_device(spec)
    obstacles = (
        (training.cuda_graphs == "off", "training.cuda_graphs is off"),
        (parallelism.pipeline_parallel_size > 1, "the host takes part in a pipeline's schedule"),
        (parallelism.context_parallel_size > 1, "the host plans who attends to what"),
        (training.attention is not None, "what sparse attention computes is chosen on the host in each step"),
        (parallelism.keeps_on_host, "what blocks keep goes to the host's memory and back"),
        (device.type != "cuda", "the job trains on CPU"),
        (not on_device, "attention to documents or windows in fp32, or by such heads, takes each by itself"),
    )
    return next((why for applies, why in obstacles if applies), None)
