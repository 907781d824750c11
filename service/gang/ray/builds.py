"""Dataset builds on Ray: one detached actor each, which has Ray Data do the work."""

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError
from ray.util import list_named_actors

from boost_core.config.storage import no_room
from service.gang.builds import BuildStatus, BuildTask
from service.models.datasets import DatasetProgress
from service.security.access import Access, AccessRules
from service.security.redaction import redact

if TYPE_CHECKING:
    from boost_core.data.pipeline.build import BuildProgress

NAMESPACE = "boost-datasets"
BUILDER_MEMORY = 1 << 30  # bytes; duplicates take 16 per document and shared band, and several times that


@dataclass
class RayBuilds:
    """``Builds`` on the cluster that this process is connected to.

    Args:
        access: The rules by which tenants get access to stores and files.
    """

    access: AccessRules
    _answers: dict[str, Any] = field(default_factory=dict)  # not yet read

    def alive(self) -> set[str]:
        """Return the IDs of all builds whose actors are alive."""
        named = list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in named if actor["namespace"] == NAMESPACE}

    def launch(self, task: BuildTask) -> None:
        """Start or resume a build; launching it twice starts one."""
        access = self.access.of(task.tenant, task.credentials)
        remote: Any = ray.remote(Builder)
        options = {"name": task.id, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        remote.options(**options, num_cpus=0, memory=BUILDER_MEMORY).remote(task, access)

    def poll(self, build_id: str) -> BuildStatus | None:
        """Return a build's status by the last poll's answer, without waiting; ``None`` if its actor is gone."""
        try:
            if build_id not in self._answers:
                self._answers[build_id] = ray.get_actor(build_id, NAMESPACE).status.remote()
            if not ray.wait([self._answers[build_id]], timeout=0)[0]:
                return BuildStatus()
            status: BuildStatus = ray.get(self._answers.pop(build_id))
        except ActorUnavailableError:
            return BuildStatus()
        except (ValueError, RayActorError, OutOfMemoryError):  # the last: killed by Ray's memory monitor
            return None
        return status

    def end(self, build_id: str) -> None:
        """End a build's actor and all its tasks; harmless if there is none."""
        self._answers.pop(build_id, None)
        with suppress(ValueError):
            ray.kill(ray.get_actor(build_id, NAMESPACE))


class Builder:
    """The actor: builds one dataset in a thread, and reports its progress.

    Args:
        task: The dataset.
        access: What the build may reach.
    """

    def __init__(self, task: BuildTask, access: Access) -> None:
        self._task, self._access, self._status = task, access, BuildStatus()
        threading.Thread(target=self._run, name="dataset", daemon=True).start()

    def status(self) -> BuildStatus:
        """Return the present status."""
        return self._status

    def _run(self) -> None:
        # From the trainer, which the cluster has but this machine may lack.
        from boost_core.data.pipeline.build import Build
        from boost_core.data.pipeline.ray_engine import RayEngine

        task = self._task
        try:
            prepare = partial(_prepare_worker, self._access)
            prepare()
            # Its tasks get processes of their own, so that its credentials never meet those of another dataset.
            engine = RayEngine(task.cpus, prepare, {"env_vars": {"BOOST_DATASET": task.id}})
            lineage = Build(task.corpus, task.url, engine, self._note_progress).run()
        except BaseException as error:  # a Rust panic is not an Exception
            text = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            problem = no_room(error, task.url, "create the dataset again") or text
            self._status = BuildStatus(self._status.progress, problem=redact(problem))
        else:
            values = lineage.model_dump(mode="json") | {"fingerprint": lineage.fingerprint}
            self._status = BuildStatus(self._status.progress, lineage=values)

    def _note_progress(self, progress: "BuildProgress") -> None:
        shared = {name: getattr(progress, name) for name in ("stage", "done", "of", "bytes", "seconds")}
        documents, cpus = progress.counts.read, self._task.cpus
        self._status = BuildStatus(DatasetProgress(**shared, documents=documents, cpus=cpus))


def _prepare_worker(access: Access) -> None:
    """Set up a process of this dataset only: reach what it may, and tokenize on one core."""
    from boost_core.data.pipeline.engine import use_one_core

    use_one_core()
    access.configure()
