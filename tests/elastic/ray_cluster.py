"""A small world to break: several Ray nodes on this machine, and the service in front of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray._private import worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.state import list_actors

from boost_core.config import JobSpec, Layout
from boost_core.messages.reports import ShapeReport
from service.client import Client, ServiceUnreachable
from service.jobs.model import JobEvent, JobRecord
from tests.jobs import tiny_job
from tests.service.conftest import free_port

PATIENCE_SECONDS = 300
BOOST = Path(sys.executable).parent / "boost"
ELASTIC_TRAINING = {
    "steps": 100_000, "sequence_length": 32, "global_batch_size": 12, "micro_batch_size": 2,
    "evaluate_every_steps": 100_000, "evaluate_sequences": 6,
}  # fmt: skip


def elastic_job(corpus: Path, replicas: tuple[int, int] = (1, 3), **changes: Any) -> JobSpec:
    """A CoLA at tp 2 with so few and so many replicas. Its folder for checkpoints is the service's to choose."""
    return tiny_job(
        corpus,
        "unused",
        **{
            "training": ELASTIC_TRAINING,
            "optimizer": {"learning_rate": 0.003, "warmup_steps": 20},
            "elasticity": {"data_parallel_size": {"min": replicas[0], "max": replicas[1]}},
            "fault_tolerance": {"memory_copy_every_steps": 5, "max_restarts": 1000},
            "checkpoint": {"url": None, "every_steps": 50, "keep_last": 2},
        }
        | changes,
    )


@contextmanager
def local_ray(**options: float) -> Iterator[str]:
    """The address of a Ray that this process has started and is connected to.

    By default Ray would make a token in the home of who runs this, and have all that comes after ask for it.
    """
    with patch.dict(os.environ, {"RAY_AUTH_MODE": "disabled"}):
        context = ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options)
        try:
            yield context.address_info["address"]
        finally:
            ray.shutdown()


class Nodes:
    """Simulated Ray nodes of some CPUs each; the head has none, so that gangs leave it alone."""

    def __init__(self, count: int, cpus: int = 2) -> None:
        self._cpus = cpus
        head = {"num_cpus": 0, "dashboard_port": free_port()}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self.cluster.add_node(num_cpus=cpus) for _ in range(count)]
        ray.init(self.cluster.address, namespace="boost", log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        address: str = self.cluster.address
        return address

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, **variables: str) -> str:
        """Add a node, with environment variables of its own; return its ID."""
        self._nodes.append(self.cluster.add_node(num_cpus=self._cpus, env_vars=variables))
        return str(self._nodes[-1].node_id)

    def remove(self, node_id: str) -> None:
        """Kill a node's raylet, without notice."""
        (node,) = (node for node in self._nodes if node.node_id == node_id)
        self._nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str, seconds: float) -> None:
        """Give notice that a node goes away in so many seconds."""
        preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + seconds) * 1000)
        accepted, _ = worker.global_worker.gcs_client.drain_node(node_id, preemption, "a test", deadline)
        assert accepted

    def taken(self) -> list[str]:
        """What of the cluster is not free: placement groups, actors and CPUs."""
        groups = [
            f"placement group {group['placement_group_id'][:8]} is {group['state']}"
            for group in ray.util.placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        living = [("state", "!=", "DEAD"), ("ray_namespace", "=", "boost")]  # not Ray's own
        actors = [
            f"{actor.class_name} {actor.actor_id[:8]} is {actor.state}"
            for actor in list_actors(address=self.address, filters=living, limit=1000)
        ]
        free = ray.available_resources().get("CPU", 0)
        total = self._cpus * len(self)
        return groups + actors + ([] if free >= total else [f"{free} of {total} CPUs are free"])

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


class Service:
    """``boost serve`` on the nodes."""

    def __init__(self, home: Path, ray_address: str) -> None:
        self.port = free_port()
        self.environment = os.environ | {
            "BOOST_HOME": str(home), "BOOST_PORT": str(self.port), "BOOST_RAY_ADDRESS": ray_address,
            "BOOST_AUTH": "false", "BOOST_RECONCILE_SECONDS": "0.2", "BOOST_GROW_COOLDOWN_SECONDS": "1",
            "BOOST_GROW_SETTLE_SECONDS": "1",
        }  # fmt: skip
        self.log = home.parent / "serve.log"
        self.client = Client(f"http://127.0.0.1:{self.port}")
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([BOOST, "serve"], env=self.environment, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.client.list()
            except ServiceUnreachable:
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


class Job:
    """A job of the service and what has been heard of it."""

    def __init__(self, service: Service, spec: JobSpec) -> None:
        self._service = service
        service.wait()
        self.id = service.client.submit(spec).id
        self.events: list[JobEvent] = []

    @property
    def record(self) -> JobRecord:
        return self._service.client.get(self.id)

    def listen(self) -> None:
        """Take in the events that are new."""
        after = self.events[-1].id if self.events else 0
        self.events += self._service.client.events(self.id, after, follow=False)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == kind]

    def until(self, done: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.listen()
            if done():
                return
            assert time.monotonic() < deadline, f"never: {what}\n{self.record}\n" + "\n".join(
                json.dumps(event.data) for event in self.events if event.kind != "progress"
            )
            time.sleep(0.1)

    @property
    def step(self) -> int:
        return max((report["step"] for report in self.of("progress")), default=0)

    @property
    def sequence(self) -> int:
        """Steps that have been reported, those that were computed again each time."""
        return len(self.of("progress"))

    @property
    def replicas(self) -> int:
        """Data parallel size of the newest gang."""
        shapes = self.of("shape")
        return _layout(shapes[-1]).dp if shapes else 0

    def trains(self, replicas: int, context: int = 1) -> None:
        """Wait until it trains with so many replicas of so many context parallel ranks, and let it make some steps."""

        def trains() -> bool:
            shapes = self.of("shape")
            layout = _layout(shapes[-1]) if shapes else None
            right = layout is not None and (layout.dp, layout.cp) == (replicas, context)
            # Step 11 follows the copy of step 10, which waits for that of step 5: now there is one to go back to.
            return right and self._steps_since_layout() >= 11

        self.until(trains, f"dp {replicas}, cp {context}")

    def _steps_since_layout(self) -> int:
        last = max(index for index, event in enumerate(self.events) if event.kind == "shape")
        return sum(event.kind == "progress" for event in self.events[last:])

    def nodes(self) -> list[str]:
        """The node of each rank."""
        nodes: list[str] = self.of("shape")[-1]["nodes"]
        return nodes

    def processes(self) -> dict[int, psutil.Process]:
        """The process of each rank of the newest gang."""
        last = max(index for index, event in enumerate(self.events) if event.kind == "shape")
        lines = [
            event.data for event in self.events[last:] if event.kind == "log" and " is up " in event.data["message"]
        ]
        pids = {line["rank"]: int(line["message"].rpartition("pid ")[2].rstrip(")")) for line in lines}
        return {rank: psutil.Process(pid) for rank, pid in pids.items() if psutil.pid_exists(pid)}

    def losses(self) -> dict[int, float]:
        """The loss of each step; of one that was computed again, the last."""
        return {report["step"]: report["loss"] for report in self.of("progress")}

    def layouts(self) -> dict[int, Layout]:
        """That of the gang which computed each of these losses."""
        layouts = dict[int, Layout]()
        for event in self.events:
            if event.kind == "shape":
                layout = _layout(event.data)
            elif event.kind == "progress":
                layouts[event.data["step"]] = layout
        return dict(sorted(layouts.items()))


def _layout(shape: dict[str, Any]) -> Layout:
    return Layout.of(ShapeReport.model_validate(shape))


@contextmanager
def world(folder: Path, nodes: int, cpus: int = 2) -> Iterator[tuple[Nodes, Service]]:
    """Nodes and a service, which all end with it."""
    cluster = Nodes(nodes, cpus)
    try:
        service = Service(folder / "home", cluster.address)
        try:
            yield cluster, service
        finally:
            service.close()
    finally:
        cluster.close()
