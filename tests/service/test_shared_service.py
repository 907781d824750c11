"""The client and the command line with a service that several people share, keys and all."""

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from service.accounts.keys import KeyStore
from service.client import ApiError, AsyncClient, Client
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.service.command_line import Boost, job_file, run_boost
from tests.service.conftest import RunningApi
from tests.service.forgetful import forgetful
from tests.service.records import GOOD, a_log_line, a_shape, a_step, numbered, run_to_the_end, start


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(home=tmp_path / "home", database_url=database_url, allowed_prefixes=(str(tmp_path),))


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    """A job whose data is where jobs may read."""
    (tmp_path / "corpus.txt").write_text("how much wood would a woodchuck chuck " * 100)
    return GOOD | {"data": {"source": {"kind": "text", "paths": [str(tmp_path / "corpus.txt")]}}}


@pytest.fixture
def shared(store: JobStore, settings: Settings) -> Iterator[RunningApi]:
    running = RunningApi(store, settings)
    yield running
    running.stop()


@pytest.fixture
def key(database_url: str) -> Callable[..., str]:
    def make(tenant: str, scope: Scope = Scope.SUBMIT) -> str:
        return KeyStore(database_url).create(f"{tenant}-{scope}", tenant, [scope]).key

    return make


@pytest.fixture
def clients(shared: RunningApi, key: Callable[..., str]) -> Iterator[Callable[..., Client]]:
    opened = []

    def open_client(tenant: str, scope: Scope = Scope.SUBMIT) -> Client:
        opened.append(Client(shared.url, api_key=key(tenant, scope)))
        return opened[-1]

    yield open_client
    for client in opened:
        client.close()


# The command line


@pytest.fixture
def boost_as(shared: RunningApi, key: Callable[..., str]) -> Callable[..., Boost]:
    def sign_in(tenant: str, scope: Scope = Scope.SUBMIT) -> Boost:
        return partial(run_boost, BOOST_URL=shared.url, BOOST_API_KEY=key(tenant, scope))

    return sign_in


def test_from_the_first_key_to_the_first_job(
    shared: RunningApi, settings: Settings, tmp_path: Path, job: dict[str, object]
) -> None:
    config = str(tmp_path / "login.json")
    database = {"BOOST_HOME": str(settings.home), "BOOST_DATABASE_URL": settings.database_url}
    made = run_boost("keys", "create", "me", "--tenant", "lab", "--scope", "admin", "--direct", **database)
    signed_in = run_boost("login", "--url", shared.url, "--key-stdin", stdin=made.stdout, BOOST_CONFIG=config)
    assert signed_in.exit_code == 0, signed_in.output
    assert "as me of tenant lab" in signed_in.stdout
    boost = partial(run_boost, BOOST_CONFIG=config)
    submitted = boost("submit", job_file(tmp_path, job))
    assert submitted.exit_code == 0, submitted.output
    job_id = submitted.stdout.split()[1]
    assert json.loads(boost("show", job_id, "--json").stdout)["submitted_by"] == "me"
    assert job_id in boost("ls").stdout
    actions = [line.split()[-2] for line in boost("audit").stdout.splitlines()[1:]]
    assert len(actions) == 2, "what was done to the database itself, and the submission"


@pytest.mark.full
def test_jobs_of_another_tenant_are_not_there(boost_as: Callable[..., Boost], tmp_path: Path, job: dict) -> None:
    ours, theirs, operator = boost_as("lab"), boost_as("rivals"), boost_as("ops", Scope.ADMIN)
    job_id = ours("submit", job_file(tmp_path, job)).stdout.split()[1]
    assert job_id in ours("ls").stdout
    assert job_id not in theirs("ls").stdout
    assert job_id in operator("ls", "--tenant", "lab").stdout
    for command in ("show", "cancel", "pause", "logs", "events", "retry", "clone", "watch"):
        refused = theirs(command, job_id)
        assert (refused.exit_code, "there is no job" in refused.stderr) == (1, True), command
    assert ours("cancel", job_id).stdout == f"{job_id} is CANCELLED\n"
    assert "QUEUED again and continues from step 0" in ours("retry", job_id).stdout


@pytest.mark.full
def test_who_may_what(boost_as: Callable[..., Boost], shared: RunningApi, tmp_path: Path, job: dict) -> None:
    reader, submitter = boost_as("lab", Scope.READ), boost_as("lab")
    assert reader("whoami").stdout == "lab-read of tenant lab, with scope read\n"
    assert reader("ls").exit_code == 0
    for boost, *refused in (
        (reader, "submit", job_file(tmp_path, job)),
        (submitter, "keys", "ls"),
        (submitter, "queues", "set", "night", "--gpus", "1"),
        (submitter, "tenants", "ls"),
        (submitter, "audit"),
        (partial(run_boost, BOOST_URL=shared.url), "ls"),
        (partial(run_boost, BOOST_URL=shared.url, BOOST_API_KEY=f"boost_abcdefgh_{'x' * 43}"), "ls"),
    ):
        assert boost(*refused).exit_code == 4, refused


@pytest.mark.full
def test_what_an_operator_does(boost_as: Callable[..., Boost], shared: RunningApi, tmp_path: Path, job: dict) -> None:
    operator, user = boost_as("ops", Scope.ADMIN), boost_as("lab")
    file = job_file(tmp_path, job)
    unknown = user("submit", file, "--queue", "night")
    assert (unknown.exit_code, "queue" in unknown.stderr) == (2, True)
    assert operator("queues", "set", "night", "--cpus", "8", "--description", "cheap hours").exit_code == 0
    assert operator("queues", "set", "night", "--gpus", "4").stdout == "queue night: GPUs 0/4, CPUs 0/8\n"
    job_id = user("submit", file, "--queue", "night").stdout.split()[1]
    (listed,) = json.loads(user("ls", "--queue", "night", "--json").stdout)["jobs"]
    assert listed["id"] == job_id
    shown = user("queues", "show", "night").stdout
    assert "cheap hours" in shown
    assert "1 QUEUED" in shown
    assert operator("queues", "rm", "night").exit_code == 1
    user("cancel", job_id)
    assert operator("queues", "rm", "night").exit_code == 0
    assert operator("tenants", "set", "lab", "--gpus", "2").stdout == "tenant lab: GPUs 0/2, CPUs 0\n"
    assert "lab" in operator("tenants", "ls").stdout
    assert user("nodes").stdout == "no scheduler has seen the cluster yet\n"
    made = json.loads(operator("keys", "create", "ci", "--tenant", "lab", "--expires", "1d", "--json").stdout)
    ci = partial(run_boost, BOOST_URL=shared.url, BOOST_API_KEY=made["key"])
    assert ci("ls").exit_code == 0
    assert made["id"] in operator("keys", "ls").stdout
    assert operator("keys", "revoke", made["id"]).exit_code == 0
    assert ci("ls").exit_code == 4


@pytest.mark.full
def test_clones_and_dry_runs(boost_as: Callable[..., Boost], tmp_path: Path, job: dict) -> None:
    boost = boost_as("lab")
    tried = boost("submit", job_file(tmp_path, job), "--dry-run")
    assert "could be submitted to the queue default" in tried.stdout, tried.output
    assert "tp 2 × pp 1 × dp 1" in tried.stdout
    assert json.loads(boost("ls", "--json").stdout)["jobs"] == []
    job_id = boost("submit", job_file(tmp_path, job)).stdout.split()[1]
    changes = ("--set", "training.steps=20", "--set", "name=longer")
    cloned = json.loads(boost("clone", job_id, *changes, "--idempotency-key", "k", "--json").stdout)
    again = json.loads(boost("clone", job_id, *changes, "--idempotency-key", "k", "--json").stdout)
    assert (cloned["id"], cloned["cloned_from"], cloned["name"]) == (again["id"], job_id, "longer")
    assert cloned["spec"]["training"]["steps"] == 20
    refused = boost("clone", job_id, "--set", "training.stesp=20")
    assert (refused.exit_code, "did you mean steps?" in refused.stderr) == (2, True)
    assert "parameters" in boost("plan", job_file(tmp_path, job)).stdout


# The client


@pytest.mark.full
def test_a_lost_answer_makes_no_second_job(
    shared: RunningApi, key: Callable[..., str], store: JobStore, job: dict[str, object]
) -> None:
    with forgetful(shared.url, lost=2) as url, Client(url, api_key=key("lab")) as client:
        submitted = client.submit(job)
    assert [each.id for each in store.page()[0]] == [submitted.id]
    with forgetful(shared.url, lost=1) as url, Client(url, api_key=key("ops", Scope.ADMIN)) as operator:
        made = operator.create_key({"name": "ci", "tenant": "lab", "scopes": ["read"]})
        assert [each.id for each in operator.keys().keys if each.name == "ci"] == [made.id]
    with Client(shared.url, api_key=made.key) as client:
        assert client.whoami().name == "ci", "the key that was heard of is the one that is good"


def test_a_lost_answer_to_a_pause_is_asked_for_again_and_is_no_second_pause(
    shared: RunningApi, key: Callable[..., str], store: JobStore, job: dict[str, object]
) -> None:
    lab = key("lab")
    with Client(shared.url, api_key=lab) as client:
        submitted = client.submit(job)
        with forgetful(shared.url, lost=1) as url, Client(url, api_key=lab) as unlucky:
            assert unlucky.pause(submitted.id).state == "PAUSED"
        assert client.get(submitted.id).state == "PAUSED"
    assert len([event for event in store.events(submitted.id) if event.data.get("state") == "PAUSED"]) == 1


@pytest.mark.full
def test_codes_etags_and_keys_that_come_again(clients: Callable[..., Client], job: dict[str, object]) -> None:
    client = clients("lab")
    first = client.submit(job, idempotency_key="once")
    assert client.submit(job, idempotency_key="once").id == first.id
    changed = client.patch(first.id, {"priority": 3}, if_match=first.etag)
    for refused, status, code in (
        (lambda: client.submit(job | {"name": "other"}, idempotency_key="once"), 422, "idempotency-key-reused"),
        (lambda: client.patch(first.id, {"priority": 4}, if_match=first.etag), 412, "precondition-failed"),
        (lambda: client.get("job-0"), 404, "job-not-found"),
        (lambda: client.resume(first.id), 409, "wrong-state"),
        (lambda: client.retry(first.id), 409, "wrong-state"),
        (lambda: client.queue("nowhere"), 404, "queue-not-found"),
        (lambda: client.checkpoint(first.id, 5), 404, "checkpoint-not-found"),
        (lambda: client.put_queue("night", {"gpus": 1}), 403, "forbidden"),
        (lambda: client.submit({}), 422, "invalid-request"),
        (lambda: clients("rivals").get(first.id), 404, "job-not-found"),
    ):
        with pytest.raises(ApiError) as caught:
            refused()
        assert (caught.value.status, caught.value.code) == (status, code)
    assert client.patch(first.id, {"priority": 4}, if_match=changed.etag).spec.priority == 4


def test_what_a_job_leaves_behind(clients: Callable[..., Client], store: JobStore, job: dict[str, object]) -> None:
    client = clients("lab")
    job_id = client.submit(job).id
    start(store, job_id)
    lines = [a_log_line("first"), a_log_line("second")]
    steps = [a_step(step) for step in range(1, 11)]
    store.append_reports(job_id, 1, numbered(a_shape(), *lines, *steps))
    history = client.metrics(job_id, 5)
    assert (history.job_id, history.from_step, history.to_step) == (job_id, 1, 10)
    assert history.samples[-1].step == 10
    assert 1 < len(history.samples) <= 5 + 1
    assert [sample.step for sample in client.metrics(job_id, from_step=3, to_step=4).samples] == [3, 4]
    logged = [event.data["message"] for event in client.logs(job_id, follow=False)]
    assert logged == ["first", "second"]
    assert not [*client.logs(job_id, rank=7, follow=False)]
    assert not [*client.logs(job_id, level="ERROR", follow=False)]
    assert len([*client.logs(job_id, rank=1, level=["ERROR", "INFO"], follow=False)]) == 2
    assert not [*client.logs(job_id, since=datetime.now(UTC) + timedelta(hours=1), follow=False)]
    assert client.checkpoints(job_id).checkpoints == []


def test_what_there_is_to_know(clients: Callable[..., Client], job: dict[str, object]) -> None:
    client, operator = clients("lab", Scope.READ), clients("ops", Scope.ADMIN)
    assert client.whoami().tenant == "lab"
    assert client.versions().api == "v1"
    assert "7b" in [preset.name for preset in client.presets().presets]
    assert client.plan(job).shapes[0].tensor_parallel_size == 2
    assert client.nodes().nodes == []
    assert [queue.name for queue in client.queues().queues] == ["default"]
    assert operator.put_queue("night", {"gpus": 2}).gpus == 2
    assert operator.delete_queue("night") is None
    assert operator.put_tenant("lab", {"gpus": 2}).gpus == 2
    assert operator.audit(limit=1).entries[0].status == 200


@pytest.mark.full
def test_many_at_once(shared: RunningApi, key: Callable[..., str], store: JobStore, job: dict[str, object]) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with AsyncClient(shared.url, api_key=key("lab")) as client:
            submitted = await asyncio.gather(*(client.submit(job, idempotency_key=str(each % 3)) for each in range(9)))
            job_id = submitted[0].id
            await asyncio.to_thread(run_to_the_end, store, job_id)
            return [each.id for each in submitted], [event.kind async for event in client.events(job_id)]

    ids, kinds = asyncio.run(run())
    assert len(set(ids)) == len(store.page()[0]) == 3
    assert kinds == [event.kind for event in store.events(ids[0])]
