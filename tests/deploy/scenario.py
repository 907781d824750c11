"""A job that loses a worker, on the real service with all that belongs to it, and a real Prometheus that looks on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from boost_core.config import JobSpec
from service.client import Client
from tests.elastic.ray_cluster import Job
from tests.jobs import tiny_job, write_corpus
from tests.postgres import postgres_server
from tests.prometheus import PROMETHEUS, Prometheus, prometheus
from tests.s3 import BUCKET, s3_server
from tests.service.serving import Server

BOOST = Path(sys.executable).parent / "boost"
TENANT = "lab"
WINDOW_SECONDS = 20  # that are compared with the ledger
_CALM_SECONDS = 8  # of steps before the worker dies
_PATIENCE_SECONDS = 180


@dataclass
class Operator:
    """A service as its operator meets it: a process, and a client with a key."""

    server: Server
    client: Client
    key: str

    def wait(self) -> None:
        """Until jobs can be scheduled."""
        self.server.until(lambda: (answer := self.server.answers("/readyz")) and answer.is_success, _PATIENCE_SECONDS)

    def metrics(self) -> str:
        answer = httpx.get(f"{self.server.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        return answer.raise_for_status().text


@dataclass
class Seen:
    """What has happened, and who can be asked about it. All times are in seconds since 1970.

    Attributes:
        operator: The service.
        prometheus: Which has seen it.
        job: Which trains on.
        submitted: When it was.
        began: When its first steps were done.
        lost: When its worker was killed.
        window: From when to when it trained undisturbed after that.
    """

    operator: Operator
    prometheus: Prometheus
    job: Job
    submitted: float
    began: float
    lost: float
    window: tuple[float, float]


@contextmanager
def lived_through(folder: Path) -> Iterator[Seen]:
    """Run all of it; the job still trains when the block begins."""
    looking_on = folder / "prometheus"
    looking_on.mkdir()
    corpus = write_corpus(folder / "corpus")
    with service(folder) as operator:
        (looking_on / "api-key").write_text(operator.key)
        rules = sorted((PROMETHEUS / "rules").glob("*.yml"))
        with prometheus(looking_on, scrape_configs(operator.server.port), rules) as server:
            yield _live_through_it(operator, server, corpus)


@contextmanager
def service(folder: Path) -> Iterator[Operator]:
    """``boost serve`` on PostgreSQL and the S3 server, with keys."""
    store = folder / "store"
    store.mkdir()
    with postgres_server() as database, s3_server(store) as s3:
        settings = {
            "BOOST_DATABASE_URL": database.create_database(), "BOOST_CHECKPOINT_ROOT": f"s3://{BUCKET}/runs",
            "BOOST_ALLOWED_PREFIXES": str(folder),
        }  # fmt: skip
        key = first_key(settings | {"BOOST_HOME": str(folder / "home")})
        server = Server(folder / "home", **settings, **s3.environment)
        try:
            with Client(server.url, api_key=key, retry_seconds=30) as client:
                operator = Operator(server, client, key)
                operator.wait()
                yield operator
        finally:
            server.end(signal.SIGTERM)


def first_key(settings: dict[str, str]) -> str:
    command = [BOOST, "keys", "create", "operator", "--tenant", TENANT, "--scope", "admin", "--direct"]
    made = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    return made.stdout.strip()


def scrape_configs(port: int) -> list[dict[str, object]]:
    """Those that are shipped, for a service on this machine and a test that has no time."""
    shipped = (PROMETHEUS / "prometheus.yml").read_text()
    mine = shipped.replace("api:8900", f"127.0.0.1:{port}").replace("refresh_interval: 15s", "refresh_interval: 1s")
    configs: list[dict[str, object]] = yaml.safe_load(mine)["scrape_configs"]
    return configs


def spec(corpus: Path) -> JobSpec:
    """Two ranks in a tensor parallel group, with a checkpoint and an evaluation every few seconds."""
    training = {
        "steps": 100_000, "sequence_length": 64, "global_batch_size": 16, "micro_batch_size": 4,
        "evaluate_every_steps": 50, "evaluate_sequences": 6,
    }  # fmt: skip
    checkpoint = {"url": None, "every_steps": 25, "keep_last": 2}
    return tiny_job(corpus, "unused", name="seen", training=training, checkpoint=checkpoint)


def _live_through_it(operator: Operator, server: Prometheus, corpus: Path) -> Seen:
    limit = {"gpus": 8}
    operator.client.put_queue("default", limit)
    operator.client.put_tenant(TENANT, limit)
    server.until(lambda: server.query('up{job="boost-api"} == 1'), "the API is scraped")  # it sees the job start
    submitted = time.time()
    job = Job(operator, spec(corpus))
    job.until(lambda: job.step >= 10, "trains", _PATIENCE_SECONDS)
    began = time.time()
    operator.client.submit(spec(corpus))  # there is no room for it: it waits
    assert httpx.get(f"{operator.server.url}/v1/jobs").status_code == 401
    _trains_for(_CALM_SECONDS, job, server)

    lost, worker = time.time(), job.processes()[1]
    _kill(worker)
    job.until(lambda: job.of("restart"), "goes on", _PATIENCE_SECONDS)
    _trains_for(_CALM_SECONDS, job, server)  # so that the way back is out of every rate
    begin = time.time()
    _trains_for(WINDOW_SECONDS, job, server)
    return Seen(operator, server, job, submitted, began, lost, (begin, time.time()))


def _kill(worker: psutil.Process) -> None:
    worker.kill()
    worker.wait(10)


def _trains_for(seconds: float, job: Job, server: Prometheus) -> None:
    """Wait until that time is over, a checkpoint is committed, and both ranks are scraped."""
    end = time.time() + seconds
    job.until(lambda: job.events[-1].time.timestamp() > end and job.of("checkpoint"), "trains on", _PATIENCE_SECONDS)
    steps = f'count(boost_rank_steps_total{{job_id="{job.id}"}}) == 2'
    server.until(lambda: server.query(steps), "both ranks are scraped")
