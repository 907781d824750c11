"""The only place that relies on Ray internals, besides ``service.gang.ray_train``; and the table of all of them.

Each private name of Ray that the service uses, what of it, and in which of the modules. … stands for
``ray.train.v2._internal.``. Their contract is tested against the pinned version (``tests/elastic``).

Checked in Ray 2.60.0:

    ray._private.arrow_serialization: imported by the fork server, as Ray's worker does (fork_server)
    ray._private.ray_constants: ENABLE_RAY_CLUSTER and its variable, two PROCESS_TYPEs (private_api)
    ray._private.services: canonicalize_bootstrap_address_or_die (private_api)
    ray._private.state: state: _connect_and_get_accessor, get_actor_table (private_api)
    ray._private.utils: get_system_memory, get_used_memory (private_api)
    ray._private.worker: print_to_stdstream, _global_node: dead_processes, global_worker: gcs_client (private_api)
    ray._private.workers.default_worker: run by a fork as its program, with --raylet-name (fork_server, fork_client)
    ray._raylet: Config, AuthenticationTokenLoader, GcsClient (private_api)
    ray.actor.ActorClassID: from_random, replaced while the fork server imports (private_api)
    ray.core.generated.autoscaler_pb2: GetClusterResourceStateReply, GetClusterStatusReply (private_api)
    ray.core.generated.gcs_pb2: ActorTableData, GcsNodeInfo (private_api)
    ray.init: option _temp_dir (gangs)
    ray.actor.ActorHandle: _actor_id (gangs)
    …callbacks.metrics.ControllerMetricsCallback: as it is (mirror)
    …callbacks.metrics.WorkerMetricsCallback: as it is (mirror)
    …callbacks.state_manager.StateManagerCallback: overridden; _state_manager, _run_id (mirror)
    …exceptions.WorkerGroupStartupFailedError: caught (mirror)
    …execution.context.DistributedContext: made (mirror)
    …execution.context.TrainRunContext: run_id (mirror)
    …execution.context.get_train_context: get_storage (rank_worker)
    …execution.controller.TrainController: overridden (mirror)
    …execution.controller.controller.TrainControllerLoopIterationResult: made (mirror)
    …execution.controller.state: the states (mirror)
    …execution.failure_handling: FailureDecision, FailurePolicy (mirror)
    …execution.scaling_policy: the decisions, ScalingPolicy (mirror)
    …execution.storage.StorageContext: made; build_checkpoint_path_from_name, storage_filesystem (mirror, rank_worker)
    …execution.worker_group: WorkerGroup and its builder, state, context and workers, overridden or made (mirror)
    …execution.worker_group.RayTrainWorker: overridden (rank_worker)
    …execution.worker_group.worker_group: SynchronizationActor, replaced (mirror)
    …state.state_actor: TrainStateActor, and its name and namespace (mirror)
    …util.ObjectRefWrapper: overridden (rank_worker)
    ray.train.v2.api.config.RunConfig: storage_context (mirror)
    ray.train.v2.api.data_parallel_trainer.DataParallelTrainer: overridden (mirror)

By their names in the environment, also in 2.60.0: RAY_RAYLET_PID and RAY_JOB_ID, which Ray gives its workers
(fork_client, fork_server, and ``service.gang.ray`` itself).
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ray
from ray import actor
from ray._private import ray_constants, services, state, utils, worker
from ray.core.generated import autoscaler_pb2, gcs_pb2

logger = logging.getLogger(__name__)

GCS_SECONDS = 10.0
ANSWER_SECONDS = 3.0
OF_A_WORKER = (  # imported by Ray in a worker
    "ray._private.workers.default_worker", "ray._private.arrow_serialization", "pydantic.v1.fields",
    "starlette.datastructures",
)  # fmt: skip
_SIGACTION_BYTES = 256  # larger than the C library's struct on any platform
_libc = ctypes.CDLL(None)
_gcs_messages, _autoscaler_messages = cast(Any, gcs_pb2), cast(Any, autoscaler_pb2)
_ALIVE = _gcs_messages.GcsNodeInfo.GcsNodeState.ALIVE
_VITAL = {ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS", ray_constants.PROCESS_TYPE_RAYLET: "raylet"}


def write_to_log() -> None:
    """Make Ray's log records and printed output in this process look like all other log lines."""
    rays_own = logging.getLogger("ray")
    rays_own.handlers.clear()
    rays_own.propagate = True

    def log_messages(data: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001
        for line in data["lines"]:
            logger.warning("%s: %s", data["pid"], line)

    worker.print_to_stdstream = log_messages


def use_token(token_file: Path) -> None:
    """Have this process and its children present a token to Ray, and a Ray started from here require it."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_file))
    # Ray read the environment when it was imported, and caches it.
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make a Ray started within the block use the loopback address, and listen on no other.

    Ray does so by itself on platforms without cluster support. On Linux it would listen on all interfaces.
    """
    name, constants = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants
    before, os.environ[name] = os.environ.get(name), "0"  # for the processes that it starts
    supported, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = supported
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def no_random_ids() -> Iterator[None]:
    """Keep Ray from drawing random IDs for actor classes defined within the block.

    The first draw seeds its generator, and all forks of this process would continue with the same random numbers.
    """
    module: Any = actor
    of_ray = module.ActorClassID

    module.ActorClassID = SimpleNamespace(from_random=lambda: of_ray(os.urandom(of_ray.size())))
    try:
        yield
    finally:
        module.ActorClassID = of_ray


@contextlib.contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keep this process's SIGTERM handler while Ray starts or stops in it.

    Ray installs its own below Python, and removes it when it stops: then SIGTERM would end the process at once.
    """
    handler = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _libc.sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        _libc.sigaction(signal.SIGTERM, handler, None)


def ended_processes() -> list[str]:
    """Return which vital processes of a Ray started by this process have ended; empty if none, or on a cluster."""
    node: Any = worker._global_node
    dead = {name for name, _ in node.dead_processes()} if node is not None else set()
    return [what for name, what in _VITAL.items() if name in dead]


def require_head() -> None:
    """Check that Ray's head answers. Call this right before a call that Ray lets wait for the head forever.

    Raises:
        ConnectionError: The head does not answer within ``ANSWER_SECONDS``.
    """
    with _gcs() as gcs:
        gcs.internal_kv_get(b"boost", None, timeout=ANSWER_SECONDS)


def gcs_address(address: str) -> str:
    """Return a cluster's ``host:port`` from any form of address that Ray accepts.

    Raises:
        ConnectionError: The address is ``auto``, and there is no cluster on this machine.
    """
    return str(services.canonicalize_bootstrap_address_or_die(address))


def nodes_here(address: str) -> set[str]:
    """Return the temporary folders of a cluster's nodes on this machine, as far as this process may talk to them."""
    gcs = cast(Any, ray)._raylet.GcsClient(address=address)
    nodes = gcs.get_all_node_info(timeout=GCS_SECONDS, state_filter=_ALIVE)
    folders = set()
    for node in nodes.values():
        address = node.node_manager_address
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:  # not an address of this machine
                continue
        # The address alone is not enough, as containers may share it; nor is the socket, as they may share a folder.
        if os.access(node.raylet_socket_name, os.W_OK):
            folders.add(node.temp_dir)
    return folders


def node_table(seconds: float | None = None) -> list[dict[str, Any]]:
    """Return all past and present nodes: ``NodeID``, ``Alive``, ``Resources``, ``Labels`` and their raylets' address.

    Args:
        seconds: Timeout for the head's answer; ``None`` for Ray's own.

    Raises:
        ConnectionError: The head does not answer.
    """
    with _gcs() as gcs:
        nodes = gcs.get_all_node_info(timeout=seconds)
    table = []
    for node_id, node in nodes.items():
        raylet = {"NodeManagerAddress": node.node_manager_address, "NodeManagerPort": node.node_manager_port}
        offers = {"Resources": dict(node.resources_total), "Labels": dict(node.labels)}
        table.append({"NodeID": node_id.hex(), "Alive": node.state == _ALIVE, **offers, **raylet})
    return table


def free_resources(seconds: float | None = None) -> dict[str, dict[str, float]]:
    """Return free resources by node; nodes that have just joined may be missing. ``seconds`` as in ``node_table``."""
    with _gcs() as gcs:
        answer = gcs.get_cluster_resource_state(timeout_s=seconds)
    reply = _autoscaler_messages.GetClusterResourceStateReply.FromString(answer)
    return {node.node_id.hex(): dict(node.available_resources) for node in reply.cluster_resource_state.node_states}


def draining_nodes(seconds: float | None = None) -> dict[str, float | None]:
    """Return the nodes that will go away, and when, in seconds since 1970; ``None`` if not known.

    ``seconds`` as in ``node_table``.
    """
    with _gcs() as gcs:
        draining: dict[str, int] = gcs.get_draining_nodes(timeout=seconds)
    return {node: deadline / 1000 if deadline > 0 else None for node, deadline in draining.items()}


def actor_processes(actor_id: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the process IDs by node of an actor, and of all actors that it has started and that end with it.

    Call ``require_head`` right before.

    Args:
        actor_id: The actor's ID in hex; without a process yet, or an unknown one, it has no processes.
    """
    accessor, message = cast(Any, state.state)._connect_and_get_accessor(), _gcs_messages.ActorTableData
    table: list[Any] = [message.FromString(each) for each in accessor.get_actor_table(None, None)]
    running = [each for each in table if each.pid and each.state != message.DEAD]
    workers = {each.address.worker_id for each in running if each.actor_id.hex() == actor_id}
    own: dict[str, list[int]] = {}
    started: dict[str, list[int]] = {}
    for each in running:
        if each.actor_id.hex() == actor_id:
            own.setdefault(each.address.node_id.hex(), []).append(each.pid)
        if each.owner_address.worker_id in workers and not each.is_detached:
            started.setdefault(each.address.node_id.hex(), []).append(each.pid)
    return own, started


def autoscaler_refuses() -> bool:
    """Whether the autoscaler says that it cannot fulfil the present request; it then does none of it.

    Raises:
        ConnectionError: Ray's head does not answer within ``ANSWER_SECONDS``.
    """
    with _gcs() as gcs:
        answer = gcs.get_cluster_status(timeout_s=ANSWER_SECONDS)
    status = _autoscaler_messages.GetClusterStatusReply.FromString(answer)
    requested = list(status.cluster_resource_state.cluster_resource_constraints)
    return bool(requested) and requested == list(status.autoscaling_state.infeasible_cluster_resource_constraints)


def free_memory(share_to_leave: float = 0.0) -> int:
    """Return the unused memory in bytes of this machine, or of this process's container, less a share of the total."""
    memory: Any = utils
    total = memory.get_system_memory()
    return int(total - memory.get_used_memory()) - int(share_to_leave * int(total))


@contextlib.contextmanager
def _gcs() -> Iterator[Any]:
    """Yield this process's client of the cluster's GCS. Creating another would block until the GCS answers."""
    try:
        yield cast(Any, worker.global_worker).gcs_client
    except cast(Any, ray).exceptions.RpcError as error:
        raise ConnectionError("Ray's head does not answer") from error
