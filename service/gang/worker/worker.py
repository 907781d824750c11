"""What a worker does as a rank. It outlives its gang: torch, the GPU context and compiled kernels stay warm.

Imports torch but not Ray; the API's process and the supervisor never import this.
"""

import errno
import gc
import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where type checkers find what torch.distributed exports
from torch.distributed.distributed_c10d import _world

from boost_core import train as trainer
from boost_core.hardware import lacks_compiler
from boost_core.messages import Drill
from boost_core.plan.resolve import out_of_memory
from boost_core.plan.snapshots import MemoryState, Region, SnapshotKey
from service.gang.assignment import Assignment, End, GangContext, RankEnd, Rendezvous, WorkerPlace, require_version
from service.gang.control.fault_detection import Heartbeat
from service.gang.worker import rank_metrics
from service.gang.worker.spare_copy import Array, portions
from service.security.redaction import redact, redact_logs

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
FLUSH_TIMEOUT_SECONDS = 10.0
COPY_WAIT_SECONDS = 2.0  # for reports to arrive; a record that lacks a step is better than a lost state
SAVER_GRACE_SECONDS = 2.0
ABORT_SECONDS = 2.0  # for aborted communicators to be gone, once nothing of the training is left
TRACE_SECONDS = 10.0  # for a trace to be written before the process ends

logger = logging.getLogger("boost_core")

# Why a rank stopped. Other libraries' errors are recognised by their messages here alone.

REFUSALS = (ValueError, ArithmeticError)  # the trainer's own messages about a job, its data or its numbers
DEFECTS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
# CUDA's words, which torch, NCCL and Triton quote, for errors that every later call in the process returns as well.
BROKEN_DEVICE = (
    "illegal memory access", "illegal instruction", "misaligned address", "invalid program counter",
    "device-side assert", "hardware stack error", "unspecified launch failure", "launch timed out",
    "uncorrectable ECC error", "uncorrectable NVLink error", "Invalid access of peer GPU memory over nvlink",
    "operation not supported on global/shared address space", "tensor memory not completely freed",
    "MPS client has been terminated", "async error has occured in external entity", "context is destroyed",
    "CUDA error: unknown error", "Cuda failure 999", "[CUDA]: unknown error",
)  # fmt: skip
_REQUESTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def end_of(error: Exception) -> RankEnd:
    """Return whether an error of the trainer would happen again, described in a line or two without secrets."""
    text = redact(str(error))
    if isinstance(error, (*REFUSALS, trainer.LastSaveFailed)):
        return RankEnd(End.LASTING, text)
    if isinstance(error, RuntimeError) and any(sign in text for sign in BROKEN_DEVICE):
        words = next(line for line in text.splitlines() if any(sign in line for sign in BROKEN_DEVICE))
        return RankEnd(End.DEVICE, words.strip(), reusable=False)
    named = f"{type(error).__name__}: {text}"
    if isinstance(error, DEFECTS):
        return RankEnd(End.LASTING, named)
    if isinstance(error, trainer.StateLost):
        return RankEnd(End.STATE_LOST, text)
    # gloo's errors are RuntimeErrors, distinguished only by their messages.
    if isinstance(error, dist.DistError) or any(sign in text for sign in BROKEN_CONNECTION):
        return RankEnd(End.CONNECTION, f"lost its connection to another rank: {text}")
    return RankEnd(End.FAILED, named)


@dataclass
class Drills:
    """Faults that a rank's process injects into itself on request. Threads may share it."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _full_until: float = 0.0
    _late: tuple[int, float] = (0, 0.0)  # number of steps, and delay of each in seconds

    def begin(self, drill: Drill) -> None:
        """Inject a fault now; the gang's controller waits for its step."""
        match drill.kind:
            case "kill_rank" | "drop_node":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang_rank":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay_rank":
                with self._lock:
                    self._late = (drill.steps, drill.seconds)
            case "fill_store":
                self._full_until = time.monotonic() + drill.seconds

    def after_step(self) -> None:
        """Delay a step if a drill says so."""
        with self._lock:
            steps, seconds = self._late
            self._late = (max(0, steps - 1), seconds)
        if steps:
            time.sleep(seconds)

    def before_save(self) -> None:
        """Refuse to write while a drill makes the store full.

        Raises:
            OSError: The store is full.
        """
        if time.monotonic() < self._full_until:
            raise OSError(errno.ENOSPC, "the store is full, by a drill")


class Worker:
    """A worker. All methods but ``train`` return at once, and may be called while ``train`` runs.

    Args:
        number: Its number among all workers of the gang.
        context: Settings of the service that workers need.
        node: Ray's ID of its node.
        actor: Ray's ID of its actor.
        address: The address of its node, on which it listens.
        gpus: The GPUs that it may use.
        push: Sends a message to the supervisor, and returns once it has arrived.
        read: Reads parts of a snapshot from another worker, by number.

    Attributes:
        place: Where it runs.
        reporter: Sends messages to the supervisor.
        snapshots: The snapshots in this process's memory.
        membership: Its part in the gang; ``None`` between gangs.
        drills: The faults that it injects on request.
        profiler: Traces its steps on request.
    """

    def __init__(
        self, number: int, context: GangContext, node: str, actor: str, address: str, gpus: tuple[str, ...],
        push: rank_metrics.Push, read: Callable[[int, SnapshotKey, Sequence[Region]], list[Array]],
    ) -> None:  # fmt: skip
        self._number, self._context, self._read = number, context, read
        self.reporter = rank_metrics.SupervisorReporter(push, number)
        self.snapshots = trainer.SnapshotStore()
        self.drills = Drills()
        self.profiler = trainer.StepProfiler(self.reporter.report)
        self.membership: trainer.Membership | None = None
        self._store: TCPStore | None = None
        self._visible: tuple[str, ...] = ()
        self._aborts: dict[dist.ProcessGroup, threading.Thread] = {}  # of the present gang's groups
        self._abort_lock = threading.Lock()
        self._steps, self._transport = rank_metrics.StepCollector(), rank_metrics.TransportCollector()
        metrics = rank_metrics.serve_metrics((self._steps, self._transport), gpus, address, context.metrics_ports)
        self.place = WorkerPlace(node, address, gpus, os.getpid(), socket.gethostname(), actor, metrics)
        redact_logs()

    def rendezvous(self) -> Rendezvous:
        """Open the store where the ranks of the next gang meet, of which this process is rank 0."""
        address = self.place.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)  # the store itself would listen on all interfaces
        port = listener.getsockname()[1]
        role: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store = TCPStore(address, port, timeout=RENDEZVOUS_TIMEOUT, **role)
        return Rendezvous(address, port, secrets.token_hex(16))

    def join(self, assignment: Assignment, recovery: MemoryState[int] | None) -> None:
        """Become a member of a gang. This takes effect at once: the gang may be told to halt before it trains.

        Args:
            assignment: The assignment of the rank.
            recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
        """
        self.membership = trainer.Membership(
            generation=assignment.generation,
            snapshots=self.snapshots,
            owner_of=assignment.owner_of,
            recovery=recovery,
            fetch=self._fetch,
            after_step=self._after_step,
            # A job resumes only from a state whose steps are in the record.
            before_copy=lambda: self.reporter.flush(COPY_WAIT_SECONDS),
            after_copy=self.reporter.copied,
            before_save=self.drills.before_save,
            goes_on=self.reporter.goes_on,
            waited_seconds=assignment.waited_seconds,
            steers={steer.number: steer for steer in assignment.steers},
        )

    def _after_step(self, times: trainer.StepTimes) -> None:
        self._steps.add(times)
        self._transport.after_step()
        self.reporter.beat(Heartbeat(times.step, times.seconds, times.busy_seconds))
        self.drills.after_step()
        self.profiler.after_step(times.step)

    def train(self, assignment: Assignment) -> RankEnd:
        """Train as a rank of the last joined gang until the job's last step, or until the gang halts or breaks up."""
        membership = self.membership
        assert membership is not None
        spec, rank = assignment.spec, assignment.rank
        self._context.write_logs(rank)
        torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
        self.reporter.begin(rank, assignment.generation)
        self.profiler.begin(rank, f"{spec.checkpoint.url}/profiles")
        handler = rank_metrics.LogReports(self.reporter, rank)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            try:
                require_version(self._context.version, "the service")
                self._context.access.configure()
                self._meet(assignment)
                world_size = dist.get_world_size()
                logger.info("rank %d of %d is up (host %s, pid %d)", rank, world_size, self.place.host, os.getpid())
                ports = self._context.metrics_ports
                if self.place.metrics is None and ports:
                    taken = f"no port from {ports[0]} to {ports[-1]} is free"
                    logger.warning("rank %d serves no metrics: %s; widen BOOST_RANK_METRICS_PORTS", rank, taken)
                outcome = trainer.train(spec, self.reporter, membership, self._context.basis)
                self.profiler.wait(TRACE_SECONDS)
                end = RankEnd(End(outcome))
            except Exception as error:
                end = end_of(error)
                if isinstance(error, torch.OutOfMemoryError):  # with what was planned, what there was, what would fit
                    requested = _REQUESTED.search(str(error))
                    size = 0 if requested is None else round(float(requested[1]) * _UNITS[requested[2]])
                    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                    text = out_of_memory(spec, size, allocated, reserved, *torch.cuda.mem_get_info())
                    end = replace(end, message=text)
                if end.how is End.CONNECTION:  # not its fault, and all ranks say the same
                    logger.warning("rank %d stops: it %s", rank, end.message)
                else:
                    logger.exception("rank %d stops", rank)
                # Whatever it takes to leave the gang, the supervisor knows why, and aborts what the others wait for.
                self.reporter.fail(end)
                self.reporter.flush(FLUSH_TIMEOUT_SECONDS)
                if end.how is End.DEVICE:  # each further call of CUDA's fails, or waits for ever
                    return end
                self.abort()
                trainer.release_broken_step(error)  # the other ranks notice when its connections close
            left = self._leave()
            # A thread of the trainer that is left would interfere with the next gang.
            savers = [thread for thread in threading.enumerate() if thread.name == "saver"]
            for saver in savers:
                saver.join(SAVER_GRACE_SECONDS)
            return replace(end, reusable=left and not any(saver.is_alive() for saver in savers))
        finally:
            logger.removeHandler(handler)
            self.profiler.end()
            self.membership, self._store = None, None
            self.reporter.flush(FLUSH_TIMEOUT_SECONDS)

    def _meet(self, assignment: Assignment) -> None:
        spec, rendezvous = assignment.spec, assignment.rendezvous
        store = self._store if assignment.rank == 0 else None
        if store is None:
            store = TCPStore(rendezvous.address, rendezvous.port, timeout=RENDEZVOUS_TIMEOUT)
        for interface, addresses in psutil.net_if_addrs().items():
            if self.place.address in (each.address for each in addresses):
                # gloo would use the one that the host's name resolves to.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                break
        on_gpu = spec.resources.gpus_per_worker > 0
        if on_gpu:
            if (lacks := lacks_compiler()) is not None:
                raise ValueError(lacks)
            self._choose_gpu(assignment.gpus)
            # Otherwise torch ends the process with its collectives; detecting a hang is the supervisor's job.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"  # and reporting a GPU's failure this worker's
            # Ranks wait for collectives, not for the work that hides them.
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
            # The savers' group, of all ranks, by gloo: otherwise each would connect to all others, and read from the
            # store as many addresses of each of them.
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            self._transport.ask()
        backend, size = "nccl" if on_gpu else "gloo", spec.parallelism.world_size
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        shared = PrefixStore(rendezvous.prefix, store)
        dist.init_process_group(backend, store=shared, rank=assignment.rank, world_size=size, device_id=device)
        self._transport.begin(assignment.rank, dist.get_backend(), dist.get_world_size())

    def _choose_gpu(self, gpus: tuple[str, ...]) -> None:
        """Make the tensor parallel group's GPUs visible, and compute on this worker's own."""
        (own,) = self.place.accelerators
        if not self._visible:  # CUDA reads it only once
            # Of parts of GPUs (MIG), CUDA shows a process only the first in the list.
            self._visible = (own,) if own.startswith("MIG-") else gpus
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible)
        torch.cuda.set_device(self._visible.index(own))

    def abort(self) -> None:
        """Make collectives fail that wait for a rank that is gone. Those of gloo fail by themselves.

        Returns before they have failed. NCCL ends a communicator's kernels at once, and then waits until every graph
        that has captured it is gone. Only the training thread can release that graph, and it may wait for any of the
        communicators. So all are aborted at the same time, each once.
        """
        membership = self.membership
        if membership is None or not dist.is_initialized() or dist.get_backend() != "nccl":
            return
        membership.abort()
        with self._abort_lock:
            for group in list(_world.pg_map):
                if group not in self._aborts:
                    self._aborts[group] = threading.Thread(target=group.abort, name="abort", daemon=True)
                    self._aborts[group].start()

    def _leave(self) -> bool:
        """Free what the gang had, which nothing refers to any more; return whether all of it is gone."""
        gc.collect()  # graphs and the model
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in list(self._aborts.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._aborts.values()):
            logger.warning("its communicators are not gone %g s after they were aborted", ABORT_SECONDS)
            return False
        try:
            if dist.is_initialized():
                dist.destroy_process_group()  # of an aborted group only forgets it
            self._aborts.clear()
            gc.collect()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # What torch keeps for itself was cut to the old gang's sizes, and would not do for the next one's.
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch._C._host_emptyCache()  # locked pages, which no other process of the host can use
        except RuntimeError as error:
            logger.warning("what the gang had cannot be freed: %s", redact(str(error)))
            return False
        return True

    def _fetch(self, owner: int, key: SnapshotKey, regions: Sequence[Region]) -> list[torch.Tensor]:
        if owner == self._number:
            return self.snapshots.read(key, regions)
        # At most 8 bytes per number: the state is fp32, or fp64 in tests.
        reads = portions(regions, lambda region: 8 * int(np.prod(region.lengths)))
        return [torch.from_numpy(part.copy()) for portion in reads for part in self._read(owner, key, portion)]
