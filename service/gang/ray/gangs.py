"""Gangs on Ray, as the service's scheduler sees them: one detached supervisor actor for each attempt of a job."""

import contextlib
import logging
import os
import queue
import secrets as chance
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError
from ray.job_config import JobConfig
from ray.util import list_named_actors

from boost_core.config import JobSpec
from boost_core.messages import WorkerCommand
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.temporary import TemporaryFolder
from service.gang.assignment import ON_THE_HEAD, GangContext
from service.gang.ray import private_api
from service.gang.ray.actors import end_processes, ready
from service.gang.ray.nodes import CHECK_SECONDS, JoinedNode, NodeChecks, end_processes_of, ray_folder
from service.gang.ray.supervisor import UPDATES, WAITING_CALLS, Supervisor
from service.gang.status import Bundle, GangKey, GangPhase, GangStatus, JobTag, NodeCapacity, Orders, PollRequest
from service.logs import LogFormat
from service.security.access import AccessRules

logger = logging.getLogger(__name__)

NAMESPACE = "boost"
POLL_SECONDS = 1.0
WORKERS_SECONDS = 5.0  # for workers to end with their supervisor
END_SECONDS = 30.0  # for nodes to say that processes have ended
OBJECT_STORE_BYTES = 128 * 2**20  # gangs pass small messages; no tensor goes through Ray
# The path of a socket may have 107 bytes. Python's multiprocessing, as in Ray's dashboard, has 32 of them below TMPDIR:
# /pymp-xxxxxxxx/listener-xxxxxxxx
_LONGEST_TMPDIR = 75
_LONGEST_GAP = 5.0  # between two polls, so that a scheduler that was held up itself does not take gangs for silent
_SILENT = GangStatus(GangPhase.STARTING, "waiting for the gang's supervisor to answer", [])


@dataclass
class _Handle:
    """The handle of one supervisor.

    Attributes:
        actor: Ray's handle.
        answer: The answer to a poll, until it is read.
        watch: The long poll in flight, which returns when the supervisor has news; ``None`` if there is none.
        silent_seconds: How long it has not answered.
        silent_at: When it was last seen not to answer, on the monotonic clock; ``None`` if it answered then.
    """

    actor: Any
    answer: Any = None
    watch: Any = None
    silent_seconds: float = 0.0
    silent_at: float | None = None


class RayGangs:
    """``Gangs`` on an embedded Ray or on a cluster. For use by one thread; each supervisor is looked up once.

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
        self._handles: dict[GangKey, _Handle] = {}
        # Processes, by node, of gangs whose hung supervisors have been killed, and since when the gangs are silent.
        self._left: dict[GangKey, tuple[float, dict[str, list[int]]]] = {}
        self._ended_watches: queue.SimpleQueue[tuple[GangKey, Any]] = queue.SimpleQueue()
        self._checks: NodeChecks | None = None  # an embedded Ray's only node is this process's own

    def connect(self) -> None:
        """Start or find Ray, which takes seconds. The calling thread must live until ``close``.

        Raises:
            ConnectionError: No cluster answers at the address.
            ValueError: Its head runs another version of BOOST, or has none.
        """
        private_api.write_to_log()
        job = JobConfig(metadata={"name": "BOOST Service", "page": self._public_url or ""})
        settings: dict[str, Any] = {"namespace": NAMESPACE, "job_config": job}
        settings |= {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            if self._token_file:
                # Created at once with its content; an existing one stays as it is.
                self._token_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Readable by its owner only.
                with tempfile.NamedTemporaryFile("w", dir=self._token_file.parent) as file:
                    file.write(chance.token_hex(32))
                    file.flush()
                    with contextlib.suppress(FileExistsError):
                        self._token_file.hardlink_to(file.name)
                private_api.use_token(self._token_file)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless the operator asks for it
            self._folder = ray_folder()
            if len(os.fsencode(folder := tempfile.gettempdir())) > _LONGEST_TMPDIR:
                logger.warning("TMPDIR is %s, too long for sockets there; Ray and ranks use /tmp instead", folder)
                os.environ["TMPDIR"] = "/tmp"  # of what is started from here; this process has noted its own
            # Ray Train's cleaner asks the dashboard which actors are alive.
            settings |= {"include_dashboard": True, "dashboard_host": "127.0.0.1", "num_cpus": self._cpus}
            place = f"{self._folder.path}/ray"  # Ray opens it to everybody, but not the folder around it
            with private_api.on_loopback(), private_api.own_sigterm_handler():
                ray.init("local", object_store_memory=OBJECT_STORE_BYTES, _temp_dir=place, **settings)
            return
        if self._token_file and self._token_file.exists() and "RAY_AUTH_MODE" not in os.environ:
            private_api.use_token(self._token_file)
        address = private_api.gcs_address(self._address)
        if not private_api.nodes_here(address):
            self._node = JoinedNode(address)
        with private_api.own_sigterm_handler():
            ray.init(address, _temp_dir=self._node.folder if self._node else None, **settings)
        self._checks = NodeChecks()
        self.nodes(CHECK_SECONDS)

    def close(self) -> None:
        """Leave the cluster, or end the embedded Ray with all its processes, including those it has lost track of."""
        self._handles, self._left, self._ended_watches, self._checks = {}, {}, queue.SimpleQueue(), None
        with private_api.own_sigterm_handler():
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
        if self._node is not None and self._node.process.poll() is not None:
            raise ConnectionError("this service's own node of the Ray cluster has ended")
        if ended := private_api.ended_processes():
            raise ConnectionError(f"the embedded Ray's {' and '.join(ended)} has ended")
        private_api.require_head()

    def nodes(self, wait_seconds: float = 0.0) -> list[NodeCapacity]:
        """Return the alive nodes that have resources for ranks, full or not.

        Args:
            wait_seconds: How long to wait for the answers of new ones, which cannot be used before.

        Raises:
            ConnectionError: Ray's head does not answer.
        """
        free = private_api.free_resources(private_api.ANSWER_SECONDS)
        draining = private_api.draining_nodes(private_api.ANSWER_SECONDS)
        known = private_api.node_table(private_api.ANSWER_SECONDS)
        nodes = {node["NodeID"]: node for node in known if node["Alive"] and node["Resources"].keys() & {"CPU", "GPU"}}
        unusable = self._checks.unusable(nodes.values(), wait_seconds) if self._checks else {}
        return [
            NodeCapacity(key, node["Resources"], free.get(key, {}), node["Labels"], key in draining, unusable.get(key))
            for key, node in nodes.items()
        ]

    def request_nodes(self, bundles: Sequence[Bundle]) -> None:
        """Ask the cluster's autoscaler for nodes that can hold all of these at once, replacing the previous request.

        The request includes what gangs already hold. Without an autoscaler it has no effect.
        """
        private_api.require_head()
        resources, labels = [bundle.resources for bundle in bundles], [bundle.labels for bundle in bundles]
        request_resources(bundles=resources, bundle_label_selectors=labels)

    refused = staticmethod(private_api.autoscaler_refuses)

    def alive(self) -> set[GangKey]:
        """Return all gangs that have not been ended."""
        private_api.require_head()
        names = [name.rpartition("-") for name in list_named_actors()]
        return {(job_id, int(attempt)) for job_id, _, attempt in names}

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        """Start a gang; launching the same attempt twice starts one."""
        # Ray shows arguments to everyone with access, so they only tell the ranks where the secret is.
        if self._public_url:
            tag = replace(tag, url=f"{self._public_url}/jobs/{tag.job_id}")
        access = self._access.of(tag.tenant, spec.credentials)
        context = GangContext(tag, access, self._metrics_ports, self._log_format, basis=basis)
        remote: Any = ray.remote  # its types lack concurrency groups
        supervisor = remote(concurrency_groups={UPDATES: WAITING_CALLS}, num_cpus=0, resources=ON_THE_HEAD)(Supervisor)
        named = supervisor.options(name=f"{tag.job_id}-{tag.attempt}", get_if_exists=True, lifetime="detached")
        actor = named.remote(spec, orders, context)
        first = actor.poll.remote(0, orders)  # it takes seconds to start and to answer
        self._handles[tag.job_id, tag.attempt] = _Handle(actor, first)

    def poll(self, requests: Sequence[PollRequest]) -> list[GangStatus | Exception | None]:
        """Ask all supervisors once, and then wait for their answers, at most a second in total.

        One that does not answer in time is neither asked nor waited for again until its answer arrives.
        """
        handles, pending = [self._handle(request.gang) for request in requests], []
        for request, handle in zip(requests, handles, strict=True):
            if handle is None or handle.answer is not None:
                continue
            if handle.watch is not None and handle.watch.done():
                handle.watch = None  # the answer will tell why it ended
            handle.answer = handle.actor.poll.remote(request.after_sequence, request.orders)
            pending.append(handle.answer)
        ready(pending, POLL_SECONDS)
        answered = set(ready((handle.answer for handle in handles if handle), 0))
        results: list[GangStatus | Exception | None] = []
        for request, handle in zip(requests, handles, strict=True):
            if handle is None:
                # Without its supervisor, but with processes that could not be killed, it counts as silent.
                left = self._left.get(request.gang)
                results.append(left and replace(_SILENT, silent_seconds=time.monotonic() - left[0]))
                continue
            answer = handle.answer
            status: GangStatus | None = None
            if answer in answered:
                handle.answer = None
                try:
                    status = ray.get(answer)
                except ActorUnavailableError:
                    pass  # it may answer later
                except (RayActorError, OutOfMemoryError):  # the latter: killed by Ray's memory monitor
                    self._handles.pop(request.gang, None)
                    results.append(None)
                    continue
                except Exception as error:
                    results.append(error)
                    continue
            if status is None:
                now = time.monotonic()
                if handle.silent_at is not None:
                    handle.silent_seconds += min(now - handle.silent_at, _LONGEST_GAP)
                handle.silent_at = now
                results.append(replace(_SILENT, silent_seconds=handle.silent_seconds))
                continue
            handle.silent_seconds, handle.silent_at = 0.0, None
            # A late answer belongs to an older request.
            fresh = [report for report in status.reports if report.sequence > request.after_sequence]
            # A supervisor started by the previous release cannot be watched, only polled.
            if handle.watch is None and hasattr(handle.actor, "wait_for_update"):
                newest = fresh[-1].sequence if fresh else request.after_sequence
                handle.watch = handle.actor.wait_for_update.remote(newest).future()
                handle.watch.add_done_callback(lambda ended, gang=request.gang: self._ended_watches.put((gang, ended)))
            results.append(status if len(fresh) == len(status.reports) else replace(status, reports=fresh))
        return results

    def _handle(self, gang: GangKey) -> _Handle | None:
        """Return the handle of a gang's supervisor; ``None`` if there is none."""
        if gang not in self._handles:
            with contextlib.suppress(ValueError):  # Ray raises this if there is none
                self._handles[gang] = _Handle(ray.get_actor("{}-{}".format(*gang)))
        return self._handles.get(gang)

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        """Wait at most ``seconds`` for supervisors with news since their last poll, and return their gangs."""
        deadline = time.monotonic() + seconds
        updated: set[GangKey] = set()
        while True:
            left = 0.0 if updated else deadline - time.monotonic()
            try:
                gang, watch = self._ended_watches.get(timeout=max(0.0, left))
            except queue.Empty:
                return updated
            handle = self._handles.get(gang)
            if handle and handle.watch is watch:
                handle.watch = None  # the next poll starts another one
                if watch.exception() is None and watch.result():
                    updated.add(gang)

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        """Send a gang a drill or a profile; harmless if the gang does not exist."""
        if handle := self._handle((job_id, attempt)):
            handle.actor.ask.remote(command)

    def end(self, job_id: str, attempt: int) -> None:
        """End all of a gang's processes and free its placement groups; harmless if the gang does not exist.

        Ray ends everything that the supervisor owns, which is all of it.
        """
        self._left.pop((job_id, attempt), None)
        if handle := self._handle((job_id, attempt)):
            del self._handles[job_id, attempt]
            ray.kill(handle.actor)

    def end_hung(self, job_id: str, attempt: int) -> None:
        """End a gang that does not answer, and return once none of its processes is left; takes seconds.

        Ray asks a process to end by itself, which a stopped or a stuck one does not do: it is killed on its node.

        Raises:
            ConnectionError: Ray's head does not answer.
            RuntimeError: Some are left; its job must not get another gang yet.
        """
        gang, problem = (job_id, attempt), f"gang {attempt} of {job_id} does not answer"
        handle, own = self._handle(gang), dict[str, list[int]]()
        if handle is not None:
            private_api.require_head()
            own, workers = private_api.actor_processes(handle.actor._actor_id.hex())
            self._left[gang] = time.monotonic(), workers
        elif gang not in self._left:
            return
        try:
            alive = {node["NodeID"] for node in private_api.node_table() if node["Alive"]}  # on others nothing is left
            for pids_by_node, seconds in ((own, 0.0), (self._left[gang][1], WORKERS_SECONDS)):
                there = [(node, pids) for node, pids in pids_by_node.items() if node in alive]
                answers = [end_processes(node, pids, seconds) for node, pids in there]
                left = [pid for pids in ray.get(answers, timeout=END_SECONDS) for pid in pids]
                if left:
                    raise RuntimeError(f"{problem}, and its processes {left} cannot be killed")
        except RayError as error:
            raise RuntimeError(f"{problem}, and was not ended: {type(error).__name__}") from error
        finally:
            self._handles.pop(gang, None)  # it is tried again after another silence
            self._left[gang] = time.monotonic(), self._left[gang][1]
        del self._left[gang]
        if handle is not None:
            ray.kill(handle.actor)
