"""What a rank's collectives go over: NCCL chooses, and reports it only in its log.

At level INFO the log has a line for each connection that NCCL makes, such as

    node:20:289 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/0/GDRDMA

NCCL writes it to a file of this process's own, unless the environment configures NCCL's log itself.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_CONNECTION = re.compile(rb"NCCL INFO .* via ([A-Z0-9]+)(?:/([^/\n]+))?")
_TO_OTHER_NODES = ("NET", "COLLNET")
# What a device plugin or a driver gives a process that may use InfiniBand, RoCE or EFA.
_RDMA_DEVICES = Path("/dev/infiniband")

logger = logging.getLogger("boost_core")


def transports(log: bytes) -> set[str]:
    """Find what connections in an NCCL log go over: ``p2p``, ``shm``, ``net/ib``, ``net/socket``, ``net/NAME``, ….

    NCCL's plugins for InfiniBand and RoCE have versions in their names (IBext_v8); all are ``net/ib``.
    """
    return {_called(kind.decode(), name.decode(errors="replace")) for kind, name in _CONNECTION.findall(log)}


def _called(kind: str, name: str) -> str:
    if kind not in _TO_OTHER_NODES:
        return kind.lower()
    return f"{kind}/{'ib' if name.startswith('IB') else name}".lower()


class TransportCollector(Collector):
    """Finds out what the present gang's collectives go over, for Prometheus and for the log.

    Args:
        rdma_devices: Folder of the devices that a process may use for RDMA.
    """

    def __init__(self, rdma_devices: Path = _RDMA_DEVICES) -> None:
        self._rdma_devices = rdma_devices
        self._log: BinaryIO | None = None
        self._path: Path | None = None
        self._found: frozenset[str] = frozenset()
        self._rank = 0
        self._looks = False

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
        self._found = frozenset({"tcp"} if backend == "gloo" and world_size > 1 else ())
        self._looks = world_size > 1
        self._open()

    def after_step(self) -> None:
        """Look once per gang, after its first step, and have rank 0 log the result."""
        if not self._looks:
            return
        self._looks = False
        self._open()
        if self._log is not None:
            self._found |= transports(self._log.read())
        if self._rank == 0 and self._found:
            logger.info("the collectives of rank 0 go over %s", ", ".join(sorted(self._found)))

    def _open(self) -> None:
        if self._log is None and self._path is not None and self._path.exists():
            self._log = self._path.open("rb")
            self._path.unlink()  # both keep their open files, and nothing is left when the process ends

    def collect(self) -> Iterator[Metric]:
        """Yield what is known so far."""
        found = GaugeMetricFamily(
            "boost_gang_transport", "Transport of the collectives, as chosen by NCCL; always 1.", labels=["transport"]
        )
        for name in sorted(self._found):
            found.add_metric([name], 1)
        yield found
        devices = len(list(self._rdma_devices.glob("uverbs*")))
        yield GaugeMetricFamily("boost_rank_rdma_devices", "RDMA devices that this rank may use.", devices)
