"""Gangs on Ray: one detached supervisor actor for each attempt of a job."""

import contextlib
import os
import secrets as chance
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util import list_named_actors

from boost_core.config import JobSpec
from boost_core.messages.commands import WorkerCommand
from boost_core.plan.measured import NOMINAL, Basis
from boost_core.temporary import TemporaryFolder
from service.gang.assignment import GangContext
from service.gang.ray.handles import SupervisorHandles, name_of
from service.gang.ray.node import JoinedNode, end_processes_of, ray_folder
from service.gang.ray.node_checks import NodeChecks
from service.gang.ray.private_api import (
    ANSWER_SECONDS,
    actor_processes,
    autoscaler_refuses,
    draining_nodes,
    ended_processes,
    free_resources,
    gcs_address,
    node_table,
    nodes_here,
    on_loopback,
    own_sigterm_handler,
    require_head,
    use_token,
    write_to_log,
)
from service.gang.ray.replica import end_processes
from service.gang.ray.supervisor import UPDATES, WAITING_CALLS, Supervisor
from service.gang.resources import ON_THE_HEAD
from service.gang.status import Bundle, GangKey, JobTag, NodeCapacity, Orders, PollRequest, PollResult
from service.logs import GangLogs, LogFormat
from service.security.access import AccessRules

NAMESPACE = "boost"
WORKERS_SECONDS = 5.0  # for workers to end with their supervisor
END_SECONDS = 30.0  # for nodes to say that processes have ended
OBJECT_STORE_BYTES = 128 * 2**20  # gangs pass small messages; no tensor goes through Ray


class RayGangs:
    """``Gangs`` on an embedded Ray or on a cluster.

    Args:
        ray_address: Address of a cluster, which this machine joins if needed; ``None`` starts a Ray inside
            this process, which ends with it.
        cpus: CPUs that an embedded Ray offers; ``None`` for all of the machine's.
        secrets: Folder of all secrets, the same on all nodes.
        token_file: File with the token that every request to Ray needs. An embedded Ray's is created if there
            is none; clusters without a token, or with one in the environment, need none. ``None`` leaves it to Ray.
        metrics_ports: Each rank serves its metrics on its node's first free one of these; empty: no metrics.
        log_format: How the processes of gangs write their logs.
        public_url: Public URL of the service, for links from Ray's dashboard; ``None`` for no links.
        prefixes: Where jobs may read and write; ``None``: anywhere. See ``AccessRules``.
    """

    def __init__(
        self, ray_address: str | None, cpus: int | None, secrets: Path, token_file: Path | None = None,
        metrics_ports: range = range(0), log_format: LogFormat = LogFormat.TEXT, public_url: str | None = None,
        prefixes: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self._address, self._cpus, self._access = ray_address, cpus, AccessRules(str(secrets), prefixes)
        self._token_file, self._public_url = token_file, public_url
        self._metrics_ports, self._log_format = metrics_ports, log_format
        self._folder: TemporaryFolder | None = None
        self._node: JoinedNode | None = None
        self._supervisors = SupervisorHandles()
        self._checks: NodeChecks | None = None  # an embedded Ray's only node is this process's own

    def connect(self) -> None:
        """Start or find Ray, which takes seconds. The calling thread must live until ``close``.

        Raises:
            ConnectionError: No cluster answers at the address.
            ValueError: Its head runs another version of BOOST, or has none.
        """
        write_to_log()
        if self._address is None:
            self._start_embedded()
            return
        if self._token_file and self._token_file.exists() and "RAY_AUTH_MODE" not in os.environ:
            use_token(self._token_file)
        address = gcs_address(self._address)
        if not nodes_here(address):
            self._node = JoinedNode(address)
        with own_sigterm_handler():
            ray.init(address, _temp_dir=self._node.folder if self._node else None, **self._settings())
        self._checks = NodeChecks()
        self._checks.wait([node["NodeID"] for node in _nodes_for_ranks()])

    def _start_embedded(self) -> None:
        if self._token_file:
            _make_token(self._token_file)
            use_token(self._token_file)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless the operator asks for it
        self._folder = ray_folder()
        with on_loopback(), own_sigterm_handler():
            ray.init(
                "local",
                num_cpus=self._cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=True,  # Ray Train's cleaner asks it which actors are alive
                dashboard_host="127.0.0.1",
                _temp_dir=f"{self._folder.path}/ray",  # Ray opens its folder to everybody, but not the one around it
                **self._settings(),
            )

    def _settings(self) -> dict[str, Any]:
        metadata = {"name": "BOOST Service", "page": self._public_url or ""}
        return {
            "namespace": NAMESPACE,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "job_config": JobConfig(metadata=metadata),
        }

    def close(self) -> None:
        """Leave the cluster, or end the embedded Ray with all its processes, including those it has lost track of."""
        self._supervisors, self._checks = SupervisorHandles(), None
        with own_sigterm_handler():
            ray.shutdown()
        if self._node is not None:
            self._node.close()
        if self._folder is not None:
            end_processes_of(self._folder.path)
            self._folder.close()
        self._node = self._folder = None

    def check(self) -> None:
        """Check that Ray's head answers, and that this process's other parts of Ray are running.

        Raises:
            ConnectionError: Something is missing. Ray would end a process that continued after a minute.
        """
        if self._node is not None and not self._node.runs:
            raise ConnectionError("this service's own node of the Ray cluster has ended")
        if ended := ended_processes():
            raise ConnectionError(f"the embedded Ray's {' and '.join(ended)} has ended")
        require_head()

    def nodes(self) -> list[NodeCapacity]:
        """Return the alive nodes that have resources for ranks, full or not.

        Raises:
            ConnectionError: Ray's head does not answer.
        """
        free, draining = free_resources(ANSWER_SECONDS), draining_nodes(ANSWER_SECONDS)
        nodes = _nodes_for_ranks()
        unusable = self._checks.unusable([node["NodeID"] for node in nodes]) if self._checks else {}
        return [
            NodeCapacity(
                node["NodeID"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                labels=node.get("Labels", {}),
                draining=node["NodeID"] in draining,
                unusable=unusable.get(node["NodeID"]),
            )
            for node in nodes
        ]

    def request_nodes(self, bundles: Sequence[Bundle]) -> None:
        """Ask the cluster's autoscaler for nodes that can hold all of these at once, replacing the previous request.

        The request includes what gangs already hold. Without an autoscaler it has no effect.
        """
        require_head()
        request_resources(
            bundles=[bundle.resources for bundle in bundles],
            bundle_label_selectors=[bundle.labels for bundle in bundles],
        )

    def refused(self) -> bool:
        """Whether the autoscaler says that it cannot fulfil the present request."""
        return autoscaler_refuses()

    def alive(self) -> set[GangKey]:
        """Return all gangs that have not been ended."""
        require_head()
        names = [name.rpartition("-") for name in list_named_actors()]
        return {(job_id, int(attempt)) for job_id, _, attempt in names}

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        """Start a gang; launching the same attempt twice starts one."""
        # Ray shows arguments to everyone with access, so they only tell the ranks where the secret is.
        if self._public_url:
            tag = replace(tag, url=f"{self._public_url}/jobs/{tag.job_id}")
        access = self._access.of(tag.tenant, spec.credentials)
        logs = GangLogs(self._log_format, tag.job_id, tag.attempt)
        context = GangContext(tag, access, self._metrics_ports, logs, basis=basis)
        gang = tag.job_id, tag.attempt
        remote: Any = ray.remote  # its types lack concurrency groups
        supervisor = remote(concurrency_groups={UPDATES: WAITING_CALLS})(Supervisor).options(
            name=name_of(gang),
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources=ON_THE_HEAD,
        )
        self._supervisors.add(gang, supervisor.remote(spec, orders, context), orders)

    def poll(self, requests: Sequence[PollRequest]) -> list[PollResult]:
        """Give orders to many gangs at once and return their answers, in the same order. Takes at most a second."""
        return self._supervisors.poll(requests)

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        """Wait at most ``seconds`` for gangs with news since their last poll, and return these gangs."""
        return self._supervisors.wait_for_updates(seconds)

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        """Send a gang a drill or a profile; harmless if the gang does not exist."""
        supervisor = self._supervisors.find((job_id, attempt))
        if supervisor is not None:
            supervisor.ask.remote(command)

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement groups; harmless if the gang does not exist.

        Ray ends everything that the supervisor owns, which is all of it.
        """
        supervisor = self._supervisors.find((job_id, attempt))
        self._supervisors.forget((job_id, attempt))
        if supervisor is not None:
            ray.kill(supervisor)

    def end_hung(self, job_id: str, attempt: int) -> None:
        """End a gang that does not answer, and return once none of its processes is left; takes seconds.

        Ray asks a process to end by itself, which a stopped or a stuck one does not do: it is killed on its node.

        Raises:
            ConnectionError: Ray's head does not answer.
            RuntimeError: Some are left; its job must not get another gang yet.
        """
        gang = job_id, attempt
        supervisor = self._supervisors.find(gang)
        if supervisor is None:
            return
        require_head()
        own, workers = actor_processes(supervisor._actor_id.hex())
        try:
            for pids_by_node, seconds in ((own, 0.0), (workers, WORKERS_SECONDS)):
                answers = [end_processes(node, pids, seconds) for node, pids in pids_by_node.items()]
                left = [pid for pids in ray.get(answers, timeout=END_SECONDS) for pid in pids]
                if left:
                    raise RuntimeError(
                        f"gang {attempt} of {job_id} does not answer, and its processes {left} cannot be killed"
                    )
        except RayError as error:
            raise RuntimeError(
                f"gang {attempt} of {job_id} does not answer, and was not ended: {type(error).__name__}"
            ) from error
        finally:
            self._supervisors.forget(gang)  # it is tried again after another silence
        ray.kill(supervisor)


def _nodes_for_ranks() -> list[dict[str, Any]]:
    """Return the alive nodes with CPUs or GPUs, as in ``node_table``."""
    return [
        node
        for node in node_table(ANSWER_SECONDS)
        if node["Alive"] and not node["Resources"].keys().isdisjoint({"CPU", "GPU"})
    ]


def _make_token(file: Path) -> None:
    """Create a token file atomically, readable only by its owner; an existing one is kept."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent) as made:  # such files are readable by their owner only
        made.write(chance.token_hex(32))
        made.flush()
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(made.name)
