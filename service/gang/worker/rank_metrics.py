"""What a rank tells of itself: metrics, for Prometheus to scrape from its own process, and reports to its supervisor.

The metrics are step counters, GPU gauges and the transport of collectives. The series name no job or rank: these
labels come from ``GET /v1/metrics/targets``, where the endpoint is found.
"""

import logging
import os
import re
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from boost_core.messages import FaultReport, LogLine, Report
from boost_core.train import StepTimes, Totals
from service.gang.assignment import Message, RankEnd
from service.gang.control.fault_detection import Heartbeat
from service.security.redaction import redact

logger = logging.getLogger("boost_core")

Push = Callable[[Message], None]  # sends a message to the supervisor, and returns once it has arrived


@dataclass(eq=False)
class StepCollector(Collector):
    """Counts a process's steps and their parts over its life. The step loop adds and scrapes read, each atomically."""

    _steps: int = 0
    _parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _communication: dict[tuple[str, str], Totals] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, times: StepTimes) -> None:
        """Add a step."""
        with self._lock:
            self._steps += 1
            for part, seconds in vars(times.parts).items():
                self._parts[part] += seconds
            for line, totals in times.communication.items():
                self._communication[line] = self._communication.get(line, Totals()) + totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counters as of the newest step."""
        with self._lock:
            steps, parts, lines = self._steps, dict(self._parts), dict(self._communication)
        yield CounterMetricFamily("boost_rank_steps", "Steps done.", steps)
        of_parts = "Seconds of steps by part; the parts add up to the steps."
        seconds = CounterMetricFamily("boost_rank_step_part_seconds", of_parts, labels=["part"])
        for part, value in parts.items():
            seconds.add_metric([part], value)
        yield seconds
        for name, text, field_name in (
            ("communication_seconds", "Seconds of collectives from start to end.", "seconds"),
            ("communication_calls", "Collectives.", "calls"),
            ("communication_bytes", "Payload bytes of collectives.", "bytes"),
            ("exposed_communication_seconds", "Seconds of collectives that were waited for.", "exposed_seconds"),
        ):
            family = CounterMetricFamily(f"boost_rank_{name}", text, labels=["collective", "group"])
            for line, totals in lines.items():
                family.add_metric(line, getattr(totals, field_name))
            yield family


_GAUGES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {  # with what reads them, given NVML and its handle
    "utilization_ratio": (
        "Share of time in which a kernel ran, from 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "memory_used_bytes": ("Memory in use.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    "memory_total_bytes": ("Total memory.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "power_watts": ("Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "temperature_celsius": (
        "Temperature of the chip.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
}


@dataclass(eq=False)
class GpuCollector(Collector):
    """Collects gauges of some GPUs; values that NVML does not provide are left out.

    Args:
        gpus: GPUs by NVML's index or by UUID.
    """

    gpus: Sequence[str]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the present values of the gauges."""
        if not self.gpus:
            return
        import pynvml

        with suppress(pynvml.NVMLError):  # there is no NVML
            pynvml.nvmlInit()  # once it is, this only counts
            yield from gauges(pynvml, self.gpus)


def gauges(nvml: Any, gpus: Sequence[str]) -> list[GaugeMetricFamily]:
    """Read the gauges of GPUs from an initialised NVML.

    Args:
        nvml: The module ``pynvml``.
        gpus: As for ``GpuCollector``.
    """
    gpu_gauges = ((f"boost_rank_gpu_{name}", text) for name, (text, _) in _GAUGES.items())
    families = [GaugeMetricFamily(name, text, labels=["gpu"]) for name, text in gpu_gauges]
    for gpu in gpus:
        try:
            by_index = gpu.isdigit()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else nvml.nvmlDeviceGetHandleByUUID(gpu)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            continue
        for family, (_, read) in zip(families, _GAUGES.values(), strict=True):
            try:
                family.add_metric([uuid], read(nvml, handle))
            except nvml.NVMLError:  # as for a part of a GPU (MIG), which has no utilization
                continue
    return families


def serve_metrics(own: Sequence[Collector], gpus: Sequence[str], address: str, ports: range) -> str | None:
    """Serve a process's metrics over HTTP for as long as it lives.

    Args:
        own: What the process measures itself.
        gpus: The GPUs that it may use, by index or UUID.
        address: The address to listen on.
        ports: The first free one of these is used.

    Returns:
        ``host:port``; ``None`` if none of the ports is free.
    """
    registry = CollectorRegistry()
    for collector in (*own, GpuCollector(gpus)):
        registry.register(collector)
    ProcessCollector(registry=registry)
    host = f"[{address}]" if ":" in address else address
    for port in ports:
        with suppress(OSError):
            start_http_server(port, address, registry)
            return f"{host}:{port}"
    return None


# The transport of collectives

_CONNECTION = re.compile(r"NCCL INFO .* via ([A-Z0-9]+)(?:/([^/\n]+))?")
_TO_OTHER_NODES = ("NET", "COLLNET")
# What a device plugin or a driver gives a process that may use InfiniBand, RoCE or EFA.
RDMA_DEVICES = Path("/dev/infiniband")


def transports(log: bytes) -> set[str]:
    """Find what connections in an NCCL log go over: ``p2p``, ``shm``, ``net/ib``, ``net/socket``, ``net/NAME``, ….

    NCCL's plugins for InfiniBand and RoCE have versions in their names (IBext_v8); all are ``net/ib``.
    """
    names = set()
    for kind, name in _CONNECTION.findall(log.decode(errors="replace")):
        path = f"{kind}/{'ib' if name.startswith('IB') else name}" if kind in _TO_OTHER_NODES else kind
        names.add(path.lower())
    return names


@dataclass(eq=False)
class TransportCollector(Collector):
    """Finds out what the present gang's collectives go over, for Prometheus and for the log.

    NCCL chooses, and reports it only in its log, which at level INFO has a line for each connection, such as

        node:20:289 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/0/GDRDMA

    NCCL writes it to a file of this process's own, unless the environment configures NCCL's log itself.
    """

    _log: BinaryIO | None = None
    _path: Path | None = None
    _transports: frozenset[str] = frozenset()
    _rank: int = 0
    _looks: bool = False

    def ask(self) -> None:
        """Have NCCL write a log. NCCL reads the setting once per process, when it starts."""
        self._open()
        if self._log is not None:
            self._log.read()  # what earlier gangs have left
        elif "NCCL_DEBUG" not in os.environ:
            self._path = Path(tempfile.gettempdir()) / f"boost-nccl-{os.getpid()}.log"
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(self._path))

    def begin(self, rank: int, backend: str, world_size: int) -> None:
        """Take note of a gang's new process group; the connections of its steps are made in the first one."""
        self._rank = rank
        self._transports = frozenset({"tcp"} if backend == "gloo" and world_size > 1 else ())
        self._looks = world_size > 1
        self._open()

    def after_step(self) -> None:
        """Look once per gang, after its first step, and have rank 0 log the result."""
        if not self._looks:
            return
        self._looks = False
        self._open()
        if self._log is not None:
            self._transports |= transports(self._log.read())
        if self._rank == 0 and self._transports:
            logger.info("the collectives of rank 0 go over %s", ", ".join(sorted(self._transports)))

    def _open(self) -> None:
        if self._log is None and self._path is not None and self._path.exists():
            self._log = self._path.open("rb")
            self._path.unlink()  # both keep their open files, and nothing is left when the process ends

    def collect(self) -> Iterator[Metric]:
        """Yield what is known so far."""
        text = "Transport of the collectives, as chosen by NCCL; always 1."
        gauge = GaugeMetricFamily("boost_gang_transport", text, labels=["transport"])
        for name in sorted(self._transports):
            gauge.add_metric([name], 1)
        yield gauge
        devices = len(list(RDMA_DEVICES.glob("uverbs*")))
        yield GaugeMetricFamily("boost_rank_rdma_devices", "RDMA devices that this rank may use.", devices)


# Reports and heartbeats to the supervisor

BACKLOG = 10_000  # reports; more accumulate only if the supervisor is stuck, and then the oldest are dropped
BEAT_SECONDS = 0.2  # between messages that carry only a heartbeat
ALIVE_SECONDS = 1.0  # after which a message is sent even if nothing has happened


class SupervisorReporter:
    """Sends reports in order from its own thread, so that the step loop never waits.

    Args:
        push: Sends a message to the supervisor, and returns once it has arrived.
        worker: Number of this process.
    """

    def __init__(self, push: Push, worker: int) -> None:
        self._push = push
        self._next = Message(worker, None, 0, [], None, None)  # without what is in the two queues
        self._waiting: deque[tuple[datetime, Report]] = deque(maxlen=BACKLOG)
        self._others: deque[Message] = deque(maxlen=BACKLOG)
        self._reported, self._arrived = 0, 0  # total reports
        self._sent = 0.0
        self._changed = threading.Condition()
        threading.Thread(target=self._send_forever, name="reports", daemon=True).start()

    def begin(self, rank: int, generation: int) -> None:
        """Send as a rank of a gang from now on; earlier reports have been flushed."""
        with self._changed:
            self._next = Message(self._next.worker, rank, generation, [], None, None)

    def report(self, report: Report) -> None:
        """Queue a report, without secrets; it is sent once the ones before it have arrived."""
        with self._changed:
            if isinstance(report, FaultReport):  # it may quote a store's error, and stores repeat what they are sent
                report = report.model_copy(update={"message": redact(report.message)})
            self._waiting.append((datetime.now(UTC), report))
            self._reported += 1
            self._changed.notify_all()

    def beat(self, beat: Heartbeat) -> None:
        """Take note of a step; of several within a moment only the last one is sent."""
        with self._changed:
            self._next = replace(self._next, beat=beat)
            self._changed.notify_all()

    def copied(self, step: int) -> None:
        """Take note that a step's state is in memory twice for every rank."""
        with self._changed:
            self._next = replace(self._next, kept_step=step)

    def goes_on(self, failure: str) -> None:
        """Take note of progress other than a step, and of the store's error if the last checkpoint is waited for."""
        with self._changed:
            self._next = replace(self._next, going_on=redact(failure))

    def fail(self, end: RankEnd) -> None:
        """Queue how training is about to end, after the reports so far."""
        with self._changed:
            self._next = replace(self._next, failed=end)
            self._reported += 1
            self._changed.notify_all()

    def relay(self, message: Message) -> None:
        """Queue another rank's sign of life; it goes with this rank's next message, within ``ALIVE_SECONDS``."""
        with self._changed:
            self._others.append(message)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all reports so far have arrived, for at most ``timeout_seconds``."""
        with self._changed:
            reported = self._reported
            self._changed.wait_for(lambda: self._arrived >= reported, timeout_seconds)

    def _has_news(self) -> bool:
        beats = self._next.beat is not None and time.monotonic() >= self._sent + BEAT_SECONDS
        return beats or bool(self._waiting or self._next.failed)

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news, ALIVE_SECONDS)
                message = replace(self._next, reports=list(self._waiting), others=tuple(self._others))
                self._next = Message(message.worker, message.rank, message.generation, [], None, None)
                self._waiting.clear()
                self._others.clear()
                reported = self._reported
            try:
                self._push(message)
            finally:  # a supervisor that is gone takes its workers with it; this thread need not outlive it
                with self._changed:
                    self._arrived, self._sent = reported, time.monotonic()
                    self._changed.notify_all()


class LogReports(logging.Handler):
    """Turns a rank's log records into reports."""

    def __init__(self, reporter: SupervisorReporter, rank: int) -> None:
        super().__init__(logging.INFO)
        self._reporter, self._rank = reporter, rank

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record, with its traceback if it has one."""
        self._reporter.report(LogLine(rank=self._rank, level=record.levelname, message=redact(self.format(record))))
