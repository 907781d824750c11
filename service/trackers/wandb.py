"""A run in Weights & Biases, logged by its own package in a separate process.

An event is logged with its ID as the run's step, which may only increase. Online, the service asks the server for the
last step before and after: what the server has is not sent again, and the package does not report what the server
refused. Offline, the events of a batch form a file named after the first of them, so that a repeated batch
replaces it.
"""

import base64
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boost_core.config.job import WandbConfig
from boost_core.temporary import TemporaryFolder
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.security.redaction import redact, register_secrets
from service.trackers.curves import LARGEST_ANSWER, Batch, NotYet, ask, client_of
from service.trackers.forwarder import BATCH
from service.trackers.tensorboard import TrackerFolder

BASE_URL = "https://api.wandb.ai"
FOLDER = "offline-wandb"  # the prefix "offline-" tells `wandb sync` that it has not been sent

_LONGEST_LINE = 300  # characters of the process's last output
_TOGETHER = 8  # processes, of a few hundred megabytes each
_room = threading.BoundedSemaphore(_TOGETHER)
_EXIT_CODES = {JobState.SUCCEEDED: 0, JobState.FAILED: 1, JobState.CANCELLED: 1}

# The package's own query before it resumes a run.
_LAST_ROWS = """
query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyTail } }
}
"""

INIT_SECONDS, FINISH_SECONDS = 30.0, 30.0
PROCESS_SECONDS = 120  # for both, and for Python and the package to start on a busy machine

# None of the service's own variables: those of the database and the stores contain passwords.
_PASSED_ON = {
    "PATH", "PYTHONPATH", "LANG", "TMPDIR", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY",
}  # fmt: skip


class WandbRefused(RuntimeError):
    """The server did not accept what was sent, or the package failed."""


class Wandb:
    """Sends a job's run to a server.

    Args:
        config: The job's settings.
        credentials: ``api_key``, and ``base_url`` for a server other than W&B's own.
        page: URL of the job's page; ``None`` if there is none.
    """

    def __init__(self, config: WandbConfig, credentials: Mapping[str, str], page: str | None = None) -> None:
        self._config, self._page = config, page
        self._key = credentials["api_key"]
        register_secrets([base64.b64encode(f"api:{self._key}".encode()).decode()])  # in the form in which it is sent
        self._url = credentials.get("base_url", BASE_URL).rstrip("/")

    def send(self, batch: Batch, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Log a batch. A run begins with the job's first point, or after a full batch without one.

        Raises:
            NotYet: There is no point yet.
            ConnectionError: The server cannot be reached, or does not answer.
            TimeoutError: The package did not finish in time.
            WandbRefused: What was sent did not arrive.
        """
        if not previous and not any(entry.values for entry in batch.entries):
            if batch.job.finished:
                return {}
            if len(batch.entries) < BATCH:  # otherwise what comes after a full one would never be read
                raise NotYet
        known = self._last_event(batch.job)
        server = {"mode": "online", "base_url": self._url, "api_key": self._key}
        run = _run(self._config, batch, self._page, known, server)
        with _logged(run) as (url, _):
            kept = {"url": url}
        # Asked afterwards, because a server that does not answer would hold the place of others' processes.
        last = max((event_id for event_id, _ in run["rows"]), default=known)
        if (received := self._last_event(batch.job)) < last:
            raise WandbRefused(f"{self._url} has points up to event {received}, but was sent up to event {last}")
        return kept

    def _last_event(self, job: JobRecord) -> int:
        """Return the newest event that the server has of a job; 0 if none."""
        variables = {"project": self._config.project, "entity": self._config.entity, "name": job.id}
        query = {"query": _LAST_ROWS, "variables": variables}
        too_large = WandbRefused(f"{self._url} answers with more than {LARGEST_ANSWER} bytes")
        try:
            with client_of(self._url, auth=("api", self._key)) as http:
                response, content = ask(http, self._url, too_large, "POST", "graphql", json=query)
        except ValueError as error:
            raise ConnectionError(f"{self._url} does not answer: {error}") from error
        answer = None
        with suppress(ValueError):
            answer = json.loads(content)
        if not response.is_success or not isinstance(answer, dict) or answer.get("errors"):
            text = redact(content.decode(errors="replace"))[:_LONGEST_LINE]
            raise WandbRefused(f"{self._url} answers {response.status_code} {text}".rstrip())
        run = ((answer.get("data") or {}).get("model") or {}).get("bucket") or {}
        rows = json.loads(run.get("historyTail") or "[]")
        return max((int(json.loads(row).get("_step", 0)) for row in rows), default=0)


@dataclass(frozen=True)
class OfflineWandb:
    """Writes a job's run to files for ``wandb sync``, in a folder next to its checkpoints.

    Attributes:
        config: The job's settings.
        folder: Where the files are.
        page: URL of the job's page; ``None`` if there is none.
    """

    config: WandbConfig
    folder: TrackerFolder
    page: str | None = None

    def send(self, batch: Batch, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Write a full batch, or the last one, to a file.

        Raises:
            NotYet: The batch is not full yet.
            TimeoutError: The package did not finish in time.
            OSError: The store or the disk refused it, for example because it is full.
            WandbRefused: The package failed.
        """
        if len(batch.entries) < BATCH and not batch.job.finished:
            raise NotYet
        if not any(entry.values for entry in batch.entries) and not self.folder.may_begin(batch.job):
            return dict(previous)
        first = batch.entries[0]
        settings = {"mode": "offline", "x_start_time": first.time.timestamp()}
        with _logged(_run(self.config, batch, self.page, 0, settings)) as (_, file):
            self.folder.write(f"{first.event_id:012d}.wandb", 0, Path(file).read_bytes())
        return dict(previous)


def _run(config: WandbConfig, batch: Batch, page: str | None, after: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a process is to log of events ``after`` one.

    Returns:
        ``settings`` of the package, besides the fixed ones; ``run``, the arguments of ``wandb.init``; ``rows``, event
        IDs, increasing, each with the values to log; ``summary``, further fields of the run's summary; and the
        ``exit_code`` of the run, if it has ended.
    """
    job = batch.job
    states = [entry.state for entry in batch.entries if entry.state is not None]
    texts = [entry.text for entry in batch.entries if entry.text]
    run: dict[str, Any] = {"id": job.id, "name": job.name, "project": config.project, "entity": config.entity}
    run |= {"group": job.spec.group, "tags": list(dict.fromkeys((*config.tags, *job.spec.tags))), "notes": page}
    run["config"] = job.spec.model_dump(mode="json", exclude_none=True)
    new = [each for each in batch.entries if each.values and each.event_id > after]
    rows = [(each.event_id, {**each.values, "step": each.step, "_timestamp": each.time.timestamp()}) for each in new]
    code = _EXIT_CODES.get(states[-1]) if states else None
    summary = {"state": texts[-1]} if texts else {}
    return {"settings": settings, "run": run, "rows": rows, "summary": summary, "exit_code": code}


@contextmanager
def _logged(run: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    """Log in a separate process; yield the run's page, and its file, which exists until the block ends."""
    # The package's own server ends when it sees that this process has ended, and may write until then.
    with _room, TemporaryFolder("boost-wandb-") as folder:
        environment = {name: value for name, value in os.environ.items() if name.upper() in _PASSED_ON}
        with subprocess.Popen(
            [sys.executable, "-m", "service.trackers.wandb"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=folder, env=environment | {"HOME": str(folder)}, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, complaints = process.communicate(json.dumps(run), timeout=PROCESS_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"wandb did not finish within {PROCESS_SECONDS} seconds") from error
            finally:
                with suppress(ProcessLookupError):  # the process and its group
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            lines = [line for line in complaints.splitlines() if line.strip()]
            last = redact(lines[-1])[:_LONGEST_LINE] if lines else ""
            raise WandbRefused(last or f"wandb exited with status {process.returncode}")
        url, file = json.loads(output.splitlines()[-1])
        yield url, file


def _end_with(service: int) -> None:
    """Exit when the service does: the next one sends the batch again."""
    while os.getppid() == service:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    """Log one batch with Weights & Biases' own package, and end: ``python -m service.trackers.wandb``.

    The package starts a server, installs handlers and blocks at will, none of which the service's process can afford.
    What to log comes as JSON on stdin; the result is JSON on the last line of stdout. An exception ends the process
    with its message in the last line of stderr.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.nice(10)  # the service, which answers requests, comes first
    batch = json.load(sys.stdin)
    folder = Path.cwd()
    # Hide the operator's own use of the package from it, keep all files in the folder, and disable error reporting.
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ[f"WANDB_{name}_DIR"] = str(folder)
    os.environ["WANDB_ERROR_REPORTING"] = "false"

    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    off = "disable_code", "disable_git", "disable_job_creation", "x_disable_stats", "x_disable_meta"
    on = (*off, "x_disable_machine_info", "silent", "finish_timeout_raises")
    fixed: dict[str, Any] = {**dict.fromkeys(on, True), "console": "off", "x_save_requirements": False}
    fixed |= {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS, "root_dir": str(folder)}
    settings = wandb.Settings(**fixed, x_update_finish_state=batch["exit_code"] is not None, **batch["settings"])
    run = wandb.init(**batch["run"], resume="allow", settings=settings)
    # The run's own step counts events, each of which is logged once; curves are drawn over the job's step.
    run.define_metric("*", step_metric="step")
    for event_id, row in batch["rows"]:
        run.log(row, step=event_id)
    run.summary.update(batch["summary"])
    run.finish(exit_code=batch["exit_code"] or 0)
    file = next(folder.glob("wandb/*/*.wandb"))  # the only one, though a link leads to it as well
    sys.stdout.write(f"\n{json.dumps([run.url, str(file)])}\n")


if __name__ == "__main__":
    main()
