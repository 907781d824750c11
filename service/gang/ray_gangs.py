"""Gangs on Ray: one detached supervisor actor for each attempt of a job."""

import contextlib
import os
import secrets as chance
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.job_config import JobConfig
from ray.util import list_named_actors

from boost_core.config import Errand, JobSpec
from service.gang.ray_private import draining_nodes, free_resources, node_table, use_token
from service.gang.resources import ON_THE_HEAD
from service.gang.status import GangPhase, GangStatus, JobTag, NodeCapacity, Orders
from service.gang.supervisor import Supervisor
from service.secrets import SecretReference

NAMESPACE = "boost"
POLL_TIMEOUT_SECONDS = 1.0
OBJECT_STORE_BYTES = 128 * 2**20  # gangs pass small messages; no tensor goes through Ray


class RayGangs:
    """``Gangs`` on a local Ray of its own, or on a cluster.

    Args:
        ray_address: Address of a cluster; ``None`` starts a Ray inside this process, which ends with it.
        cpus: CPUs that an embedded Ray offers; ``None`` for as many as the machine has.
        secrets: Folder of all secrets, the same on all nodes.
        token_file: File with the token without which Ray does nothing for anybody. An embedded Ray's is made if there
            is none; a cluster without one, or whose token the environment tells, needs none. ``None`` leaves it to Ray.
        public_url: Where people reach the service, for links from Ray's dashboard; ``None`` for no links.
    """

    def __init__(
        self, ray_address: str | None, cpus: int | None, secrets: Path, token_file: Path | None = None,
        public_url: str | None = None,
    ) -> None:  # fmt: skip
        self._address, self._cpus, self._secrets = ray_address, cpus, str(secrets)
        self._token_file, self._public_url = token_file, public_url
        self._folder: str | None = None

    def connect(self) -> None:
        """Start or find Ray, which takes seconds. The calling thread must live until ``close``.

        Raises:
            ConnectionError: There is no cluster at the address.
        """
        settings: dict[str, Any] = {
            "namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR",
            "job_config": JobConfig(metadata={"name": "BOOST Service", "page": self._public_url or ""}),
        }  # fmt: skip
        if self._address is not None:
            if self._token_file and self._token_file.exists() and "RAY_AUTH_MODE" not in os.environ:
                use_token(self._token_file)
            ray.init(self._address, **settings)
            return
        if self._token_file:
            _make_token(self._token_file)
            use_token(self._token_file)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing goes out unless its owner asks for it
        self._folder = tempfile.mkdtemp(prefix="boost-ray-")  # short: Ray puts sockets there
        ray.init(
            "local",
            num_cpus=self._cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,  # Ray Train's cleaner asks it which actors are alive
            dashboard_host="127.0.0.1",
            _temp_dir=self._folder,
            **settings,
        )

    def close(self) -> None:
        """Leave the cluster, or end the embedded Ray with all its processes."""
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def nodes(self) -> list[NodeCapacity]:
        """The alive nodes of the cluster."""
        free, draining = free_resources(), draining_nodes()
        return [
            NodeCapacity(
                node["NodeID"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                labels=node.get("Labels", {}),
                draining=node["NodeID"] in draining,
            )
            for node in node_table()
            if node["Alive"]
        ]

    def alive(self) -> set[tuple[str, int]]:
        """Job id and attempt of every gang that has not been ended."""
        names = [name.rpartition("-") for name in list_named_actors()]
        return {(job_id, int(attempt)) for job_id, _, attempt in names}

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders) -> None:
        """Start a gang; launching the same attempt twice starts one."""
        # Ray shows arguments to whoever may look, so they say only where the ranks find the secret.
        if self._public_url:
            tag = replace(tag, url=f"{self._public_url}/jobs/{tag.job_id}")
        secret = SecretReference(self._secrets, tag.tenant, spec.credentials) if spec.credentials else None
        ray.remote(Supervisor).options(
            name=_name(tag.job_id, tag.attempt),
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources=ON_THE_HEAD,
        ).remote(spec, orders, secret, tag)

    def poll(self, job_id: str, attempt: int, after_sequence: int, orders: Orders) -> GangStatus | None:
        """Give orders; the gang's status, or ``None`` if there is no such gang. Takes a second at most."""
        supervisor = _find(job_id, attempt)
        if supervisor is None:
            return None
        try:
            status: GangStatus = ray.get(supervisor.poll.remote(after_sequence, orders), timeout=POLL_TIMEOUT_SECONDS)
        except (GetTimeoutError, ActorUnavailableError):
            return GangStatus(GangPhase.STARTING, "waits for the gang's supervisor to answer", [])
        except RayActorError:
            return None
        return status

    def ask(self, job_id: str, attempt: int, errand: Errand) -> None:
        """Have a gang do something besides training; harmless if there is none."""
        supervisor = _find(job_id, attempt)
        if supervisor is not None:
            supervisor.ask.remote(errand)

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement groups; harmless if there is none.

        Ray ends what the supervisor owns, which is everything.
        """
        supervisor = _find(job_id, attempt)
        if supervisor is not None:
            ray.kill(supervisor)


def _make_token(file: Path) -> None:
    """Have a token in a file that only its owner can read, whole from its beginning; one that is there stays."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent) as made:  # only its owner can read these
        made.write(chance.token_hex(32))
        made.flush()
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(made.name)


def _name(job_id: str, attempt: int) -> str:
    return f"{job_id}-{attempt}"


def _find(job_id: str, attempt: int) -> Any | None:
    try:
        return ray.get_actor(_name(job_id, attempt))
    except ValueError:  # Ray's way to say that there is none
        return None
