"""Datasets over HTTP and in the record, with a cluster that does as the test says; test_end_to_end has the real one."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from boost_core.data.corpus import load_corpus
from boost_core.data.pipeline.build import Build
from boost_core.data.pipeline.engine import LocalEngine
from boost_core.data.tokenizers import train_bpe
from service.cli.console import read_as
from service.client import ApiError, Client
from service.gang.builds import BuildStatus, BuildTask
from service.gang.ray.builds import Builder
from service.gang.status import NodeCapacity
from service.jobs.datasets import MOST_BUILDING, DatasetBuilds, DatasetConflict, DatasetStore
from service.jobs.leases import LeaseLost, Leases
from service.jobs.model import JobRecord, Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.datasets import DatasetProgress, DatasetRequest, DatasetState
from service.scheduler.datasets import ASIDE_SECONDS, LAUNCH_PAUSE, MOST_LAUNCHES, DatasetReconciler, job_in_need
from service.scheduler.quotas import Limits
from service.security.access import Access
from tests.jobs import tiny_job, write_corpus
from tests.service.command_line import boost_at
from tests.service.conftest import RunningApi, With
from tests.service.records import a_shape, a_spec, numbered, start

PROGRESS = DatasetProgress(stage="files", done=1, of=6, documents=1, bytes=10, seconds=1.0)


class Cluster:
    """``Builds`` that are made at once, here, when the test lets them."""

    def __init__(self) -> None:
        self.tasks: dict[str, BuildTask] = {}
        self.statuses: dict[str, BuildStatus] = {}

    def alive(self) -> set[str]:
        return set(self.tasks)

    def launch(self, task: BuildTask) -> None:
        self.tasks[task.id], self.statuses[task.id] = task, BuildStatus(PROGRESS)

    def poll(self, dataset_id: str) -> BuildStatus | None:
        return self.statuses.get(dataset_id)

    def end(self, dataset_id: str) -> None:
        self.tasks.pop(dataset_id, None)
        self.statuses.pop(dataset_id, None)

    def make(self) -> None:
        """Make what has been launched, by the real pipeline."""
        for task in self.tasks.values():
            lineage = Build(task.corpus, task.url, LocalEngine(1), id).run()
            told = lineage.model_dump(mode="json") | {"fingerprint": lineage.fingerprint}
            self.statuses[task.id] = BuildStatus(PROGRESS, lineage=told)


def nobody(_: float) -> None:
    """No job waits for CPUs."""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


class Clock:
    """Tells the time that the test says."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reconciler(store: JobStore, cluster: Cluster, clock: Clock) -> DatasetReconciler:
    limits = Limits(tenants={"poor": {"CPU": 0.5}})
    return DatasetReconciler(DatasetBuilds(store), cluster, 2.0, lambda: limits, nobody, clock)


def request(tmp_path: Path, name: str = "corpus-v1", **changes: Any) -> dict[str, Any]:
    corpus = write_corpus(tmp_path / "corpus")
    source = {"kind": "text", "paths": [str(corpus)]}
    return {"name": name, "source": source, "validation_fraction": 0.3, "url": str(tmp_path / "data")} | changes


def make(client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler, **changes: Any) -> None:
    client.create_dataset(request(tmp_path, **changes))
    reconciler.tick()
    cluster.make()
    reconciler.tick()


def test_a_dataset_from_its_name_to_a_job(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    created = client.create_dataset(request(tmp_path, filters=[{"measure": "words", "min": 3}]))
    assert (created.state, created.message) == (DatasetState.BUILDING, "waits for its turn")
    job = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "dataset": "corpus-v1"})
    with pytest.raises(ApiError, match=r"data\.dataset: the dataset 'corpus-v1' is BUILDING"):
        client.submit(job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": 256})}))
    reconciler.tick()
    reconciler.tick()
    assert client.dataset("corpus-v1").progress == PROGRESS
    cluster.make()
    reconciler.tick()
    ready = client.dataset("corpus-v1")
    assert (ready.state, ready.message, ready.counts["kept"]) == (DatasetState.READY, "holds 6 documents", 6)
    assert [Path(file["file"]).name for file in ready.lineage["files"]] == [f"{number}.txt" for number in range(6)]
    assert ready.fingerprint == ready.lineage["fingerprint"]
    assert not cluster.tasks
    record = client.submit(job)
    assert record.spec.data.source.paths == (ready.url,)
    assert record.spec.data.dataset == "corpus-v1"
    with pytest.raises(ApiError, match=f"in use by the job {record.id}") as refused:
        client.delete_dataset("corpus-v1")
    assert refused.value.code == "dataset-conflict"
    assert client.clone(record.id, {}).spec.data == record.spec.data
    for each in client.list().jobs:
        client.cancel(each.id)
    client.delete_dataset("corpus-v1")
    assert client.datasets().datasets == []
    with pytest.raises(ApiError, match="there is no dataset 'corpus-v1'"):
        client.submit(job)


def test_a_model_with_too_few_tokens_for_a_dataset_is_refused(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    make(client, tmp_path, cluster, reconciler)
    job = tiny_job(
        tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "dataset": "corpus-v1"},
        model={"vocab_size": 200},
    )  # fmt: skip
    for call in (client.submit, client.dry_run, client.plan):
        with pytest.raises(ApiError, match=r"model\.vocab_size: the dataset 'corpus-v1' has 256 tokens and "):
            call(job)


def test_a_plan_notes_how_often_a_dataset_is_read(
    api: RunningApi, client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    make(client, tmp_path, cluster, reconciler)
    shown = boost_at(api.url)("datasets", "show", "corpus-v1").stdout
    counts = client.dataset("corpus-v1").counts
    assert f"validation tokens {counts['validation_tokens']}\n" in shown and "vocabulary        256\n" in shown
    job = tiny_job(
        tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "dataset": "corpus-v1"},
        training={"steps": None, "tokens": 10**9},
    )  # fmt: skip
    tokens = counts["tokens"] - counts["validation_tokens"]
    epochs = f"{job.training.total_tokens / tokens:,.1f}"
    note = f"the {tokens:,} training tokens of the dataset 'corpus-v1' are read {epochs} times"
    assert note in client.dry_run(job).plan.notes and note in client.plan(job).notes


def test_show_says_what_each_filter_has_left_out(
    api: RunningApi, client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "short.txt").write_text("two words")
    make(client, tmp_path, cluster, reconciler, filters=[{"measure": "words", "min": 3}])
    assert "by words          1 filtered out" in boost_at(api.url)("datasets", "show", "corpus-v1").stdout.splitlines()


def test_one_is_made_after_the_other_and_others_are_told_to_wait(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    for name in ("a", "b"):
        client.create_dataset(request(tmp_path, name))
    reconciler.tick()
    assert [cluster.tasks[each].cpus for each in cluster.tasks] == [2.0]
    cluster.make()
    reconciler.tick()
    assert [each.state for each in client.datasets().datasets] == [DatasetState.READY, DatasetState.BUILDING]
    reconciler.tick()
    assert [each.rpartition("-")[0] for each in cluster.tasks] == [client.dataset("b").id]
    with pytest.raises(ApiError, match="the dataset 'a' is READY; delete it, or take another name"):
        client.create_dataset(request(tmp_path, "a"))
    with pytest.raises(ApiError, match="the dataset 'b' is being built; cancel it first"):
        client.delete_dataset("b")


def test_cancelled_and_failed_ones_go_on_in_their_folder(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    first = client.create_dataset(request(tmp_path))
    reconciler.tick()
    assert client.cancel_dataset("corpus-v1").state is DatasetState.CANCELLED
    reconciler.tick()
    assert not cluster.tasks
    again = client.create_dataset(request(tmp_path))
    assert (again.state, again.id, again.url) == (DatasetState.BUILDING, first.id, first.url)
    reconciler.tick()
    (build,) = cluster.tasks
    cluster.statuses[build] = BuildStatus(PROGRESS, problem="No space left on device")
    reconciler.tick()
    failed = client.dataset("corpus-v1")
    assert (failed.state, failed.message) == (DatasetState.FAILED, "No space left on device")
    with pytest.raises(ApiError, match="is FAILED; there is nothing to cancel"):
        client.cancel_dataset("corpus-v1")
    make(client, tmp_path, cluster, reconciler)
    assert client.dataset("corpus-v1").state is DatasetState.READY


def test_one_whose_process_is_gone_is_begun_again_later_and_not_for_ever(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler, clock: Clock
) -> None:
    dataset = client.create_dataset(request(tmp_path))
    for launch in range(MOST_LAUNCHES):
        reconciler.tick()
        assert list(cluster.tasks) == [f"{dataset.id}-1"]
        cluster.end(f"{dataset.id}-1")
        clock.time += LAUNCH_PAUSE * 2**launch - timedelta(seconds=1)
        if launch < MOST_LAUNCHES - 1:
            reconciler.tick()
            assert not cluster.tasks, "it is not begun again at once"
        clock.time += timedelta(seconds=1)
    reconciler.tick()
    failed = client.dataset("corpus-v1")
    assert (failed.state, cluster.tasks) == (DatasetState.FAILED, {})
    assert "has died 3 times" in failed.message and "create it again" in failed.message
    client.create_dataset(request(tmp_path))
    reconciler.tick()
    assert list(cluster.tasks) == [f"{dataset.id}-2"]


def test_while_one_waits_to_be_begun_again_another_is_made(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    first, second = (client.create_dataset(request(tmp_path, name)) for name in ("a", "b"))
    reconciler.tick()
    cluster.end(f"{first.id}-1")
    reconciler.tick()
    assert list(cluster.tasks) == [f"{second.id}-1"]


def test_what_is_told_of_an_earlier_attempt_is_not_of_this_one(
    client: Client, store: JobStore, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    client.create_dataset(request(tmp_path, seed=1))
    reconciler.tick()
    (before,) = DatasetBuilds(store).waiting()
    cluster.make()
    client.cancel_dataset("corpus-v1")
    client.create_dataset(request(tmp_path, seed=2))
    assert not DatasetBuilds(store).update(before, state=DatasetState.READY)
    reconciler.tick()
    assert not cluster.tasks, "the one before is ended first"
    reconciler.tick()
    assert [task.corpus.seed for task in cluster.tasks.values()] == [2]
    assert client.dataset("corpus-v1").state is DatasetState.BUILDING


def test_a_deleted_one_is_ended_and_then_forgotten(
    client: Client, store: JobStore, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    first = client.create_dataset(request(tmp_path))
    reconciler.tick()
    client.cancel_dataset("corpus-v1")
    client.delete_dataset("corpus-v1")
    assert client.datasets().datasets == []
    second = client.create_dataset(request(tmp_path))
    assert second.id != first.id
    reconciler.tick()
    assert not cluster.tasks
    reconciler.tick()
    assert list(cluster.tasks) == [f"{second.id}-1"]
    builds = {f"{first.id}-1", f"{second.id}-1", "dataset-of-another-service-1"}
    assert DatasetBuilds(store).known(builds) == {f"{second.id}-1"}


def test_one_that_is_cancelled_and_deleted_during_a_pass_is_not_begun(
    client: Client, store: JobStore, tmp_path: Path, cluster: Cluster
) -> None:
    client.create_dataset(request(tmp_path))

    def limits() -> Limits:  # is asked between the look at the record and the launch
        client.cancel_dataset("corpus-v1")
        client.delete_dataset("corpus-v1")
        return Limits()

    DatasetReconciler(DatasetBuilds(store), cluster, 2.0, limits, nobody).tick()
    assert not cluster.tasks


def test_tenants_take_turns(store: JobStore, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler) -> None:
    datasets, turns = DatasetStore(store), []
    for name, tenant in (("a", "lab"), ("b", "lab"), ("c", "poor"), ("d", "other")):
        datasets.create(DatasetRequest.model_validate(request(tmp_path, name)), "/checkpoints", Owner(tenant, "alice"))
    for _ in range(8):
        reconciler.tick()
        turns += [task.tenant for task in cluster.tasks.values()]
        cluster.make()
    assert turns == ["lab", "other", "lab"]
    poor = datasets.get("c", "poor")
    assert (poor.state, poor.message) == (
        DatasetState.FAILED,
        "the tenant's quota is 0.5 CPUs, but building a dataset takes at least one",
    )


def test_of_two_that_create_a_failed_one_again_the_later_is_told(store: JobStore, tmp_path: Path) -> None:
    datasets, owner = DatasetStore(store), Owner("lab", "alice")
    wanted = DatasetRequest.model_validate(request(tmp_path))
    datasets.create(wanted, "/checkpoints", owner)
    datasets.cancel("corpus-v1", "lab")
    datasets.create(wanted, "/checkpoints", owner)
    with pytest.raises(DatasetConflict, match="is BUILDING; cancel it first, or take another name"):
        datasets.create(wanted, "/checkpoints", owner)
    assert [build.attempt for build in DatasetBuilds(store).waiting()] == [2]


def test_only_who_has_the_lease_writes(store: JobStore, client: Client, tmp_path: Path, cluster: Cluster) -> None:
    client.create_dataset(request(tmp_path))
    lease = Leases(store.engine, "one").take("scheduler", 30)
    Leases(store.engine, "one").renew(lease, 0.0)
    assert Leases(store.engine, "other").take("scheduler", 30)
    overtaken = DatasetBuilds(store, lease)
    with pytest.raises(LeaseLost):
        DatasetReconciler(overtaken, cluster, 2.0, Limits, nobody).tick()
    with pytest.raises(LeaseLost):
        overtaken.update(overtaken.waiting()[0], message="is being built")
    assert (client.dataset("corpus-v1").message, cluster.tasks) == ("waits for its turn", {})


def test_a_clone_keeps_its_shards_when_the_name_means_others(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    make(client, tmp_path, cluster, reconciler)
    job = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "dataset": "corpus-v1"})
    original = client.submit(job)
    client.cancel(original.id)
    client.delete_dataset("corpus-v1")
    clone = client.clone(original.id, {})
    assert clone.spec.data == original.spec.data
    client.cancel(clone.id)
    make(client, tmp_path, cluster, reconciler, seed=2)
    assert client.clone(clone.id, {}).spec.data == original.spec.data
    for change in ({"dataset": "corpus-v1"}, {"dataset": None}, {"dataset": None, "tokenizer": "bytes"}):
        changed = client.clone(clone.id, {"data": change}).spec.data
        assert changed.source == (original.spec.data.source if change["dataset"] else None)
    mixture = {"dataset": None, "mixture": [{"dataset": "corpus-v1", "weight": 1}]}
    assert client.clone(clone.id, {"data": mixture}).spec.data.mixture[0].dataset == "corpus-v1"
    fresh = client.clone(clone.id, {"data": {"source": None}}).spec.data
    assert fresh.source.paths == (client.dataset("corpus-v1").url,) != original.spec.data.source.paths
    with pytest.raises(ApiError, match=r"data\.source: names other shards"):
        client.submit(original.spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Corpus"}, "name: should match"),
        ({"source": {"kind": "text", "paths": ["/nowhere/*.txt"]}}, r"source\.paths: there is no file at"),
        ({"source": {"kind": "parquet", "paths": [__file__]}}, r"source\.paths: .* is not a complete Parquet file"),
        ({"source": {"kind": "tokenized", "paths": ["/nowhere"]}}, "is tokens already"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, "tokenizer: there is no file at"),
        ({"credentials": "absent"}, "credentials: tenant 'default' has no secret"),
        ({"filters": [{"measure": "words", "min": 2, "max": 1}]}, "must not exceed max"),
        ({"url": "ftp://host/folder"}, "use a local path"),
        ({"near_dedup": {"bands": 0}}, "bands"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_field(
    client: Client, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        client.create_dataset(request(tmp_path) | changes)
    assert client.datasets().datasets == []


def test_files_that_are_no_text_by_their_names_are_not_read_as_text(client: Client, tmp_path: Path) -> None:
    wanted = request(tmp_path, on_error="skip")
    (tmp_path / "corpus" / "more.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ApiError, match=r"more\.jsonl' is jsonl by its name, .* write kind: jsonl"):
        client.create_dataset(wanted)


def test_a_tenant_has_only_so_many_made_at_a_time(client: Client, tmp_path: Path) -> None:
    for number in range(MOST_BUILDING):
        client.create_dataset(request(tmp_path, f"d{number}"))
    with pytest.raises(ApiError, match=f"{MOST_BUILDING} are being built"):
        client.create_dataset(request(tmp_path, "one-more"))


def test_a_job_with_a_dataset_and_sources_of_its_own_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match="both a dataset and its own sources"):
        tiny_job(corpus, tmp_path, data={"dataset": "corpus-v1"})
    with pytest.raises(ValueError, match="datasets come with their tokenizer"):
        tiny_job(corpus, tmp_path, data={"source": None, "dataset": "corpus-v1", "tokenizer": "bytes"})


def test_a_tenant_has_its_own_datasets_alone(store: JobStore, client_with: With, tmp_path: Path) -> None:
    wanted = DatasetRequest.model_validate(request(tmp_path))
    DatasetStore(store).create(wanted, "/checkpoints", Owner("lab", "alice"))
    assert client_with(Scope.READ, tenant="lab").get("/v1/datasets/corpus-v1").json()["tenant"] == "lab"
    other = client_with(Scope.SUBMIT, tenant="other")
    assert other.get("/v1/datasets").json() == {"datasets": []}
    answers = [other.get("/v1/datasets/corpus-v1"), other.delete("/v1/datasets/corpus-v1")]
    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(404, "dataset-not-found")}
    assert other.post("/v1/datasets/corpus-v1/cancel", params={"tenant": "lab"}).status_code == 404
    admin = client_with(Scope.ADMIN, tenant="operators")
    assert admin.post("/v1/datasets/corpus-v1/cancel").status_code == 404
    assert admin.post("/v1/datasets/corpus-v1/cancel", params={"tenant": "lab"}).json()["state"] == "CANCELLED"
    outside = other.post("/v1/datasets", json=request(tmp_path))
    assert (outside.status_code, "is outside of what this tenant may use" in outside.text) == (422, True)


def test_a_panic_of_what_makes_a_dataset_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As Rust's, which is no Exception."""

    def panic(*_: object) -> None:
        raise PanicError("index out of bounds")

    monkeypatch.setattr("boost_core.data.pipeline.build.Build", panic)
    monkeypatch.setattr("service.gang.ray.builds._prepare_worker", id)
    corpus = DatasetRequest.model_validate(request(tmp_path)).corpus
    builder = Builder(BuildTask("dataset-1-1", "lab", corpus, str(tmp_path), None, 2.0), Access())
    for thread in threading.enumerate():
        if thread.name == "dataset":
            thread.join()
    assert builder.status().problem == "PanicError: index out of bounds"


def test_the_example_is_legal() -> None:
    example = Path(__file__).parents[2] / "examples" / "datasets" / "python-v1.yaml"
    assert read_as(DatasetRequest, example).name == "python-v1"


def test_a_build_makes_room_for_a_job_that_waits_for_its_cpus(
    client: Client, store: JobStore, tmp_path: Path, cluster: Cluster, clock: Clock
) -> None:
    node = NodeCapacity("node-a", {"CPU": 2.0}, {"CPU": 0.0})

    def in_need(cpus: float) -> JobRecord | None:
        return job_in_need(cpus, store.active(), [node], Limits())

    reconciler = DatasetReconciler(DatasetBuilds(store), cluster, 2.0, Limits, in_need, clock)
    client.create_dataset(request(tmp_path))
    for _ in range(2 * MOST_LAUNCHES):  # more often than a build may die
        reconciler.tick()
        assert len(cluster.tasks) == 1
        reconciler.tick()
        assert client.dataset("corpus-v1").message == "is being built"
        job = store.create(a_spec(), "file:///c")
        reconciler.tick()
        assert (cluster.tasks, client.dataset("corpus-v1").state) == ({}, DatasetState.BUILDING)
        assert f"has made room for {job.id}" in client.dataset("corpus-v1").message
        reconciler.tick()
        assert not cluster.tasks, "not before the job has had time to start"
        store.request_cancel(job.id)
        clock.time += ASIDE_SECONDS
    reconciler.tick()
    other = store.create(a_spec(), "file:///c", Owner("elsewhere", "eve"))
    reconciler.tick()
    message = client.dataset("corpus-v1").message
    assert message.startswith("has made room for a job of another tenant") and other.id not in message


def test_room_that_is_made_twice_counts_once(
    client: Client, store: JobStore, tmp_path: Path, cluster: Cluster, clock: Clock
) -> None:
    node = NodeCapacity("node-a", {"CPU": 2.0}, {"CPU": 0.0})
    waiting = partial(job_in_need, nodes=[node], limits=Limits())
    reconciler = DatasetReconciler(
        DatasetBuilds(store), cluster, 2.0, Limits, lambda cpus: waiting(cpus, store.active()), clock
    )
    client.create_dataset(request(tmp_path))
    reconciler.tick()
    job = store.create(a_spec(), "file:///c")
    with patch.object(cluster, "end", side_effect=OSError):  # Ray's own services may be away
        for _ in range(2):
            with pytest.raises(OSError):
                reconciler.tick()
    store.request_cancel(job.id)
    cluster.tasks.clear()
    reconciler.tick()
    assert len(cluster.tasks) == 1


def test_a_build_stays_where_it_is_in_no_jobs_way(store: JobStore) -> None:
    full = NodeCapacity("node-a", {"CPU": 2.0}, {"CPU": 0.0})
    first = store.create(a_spec(), "file:///c")
    assert (found := job_in_need(2.0, store.active(), [full], Limits())) and found.id == first.id
    assert job_in_need(1.0, store.active(), [full], Limits()) is None, "one CPU more is not enough"
    free = NodeCapacity("node-b", {"CPU": 2.0}, {"CPU": 2.0})
    assert job_in_need(2.0, store.active(), [full, free], Limits()) is None, "it starts without"
    poor = Limits(tenants={"default": {"CPU": 1.0}})
    assert job_in_need(2.0, store.active(), [full], poor) is None, "it waits for its quota"
    start(store, first.id)
    store.append_reports(first.id, 1, numbered(a_shape()))  # a rank on node-a, and one on node-b
    waiting = store.create(a_spec(), "file:///c")
    nodes = [replace(full, total={"CPU": 3.0}), replace(full, node_id="node-b", free={"CPU": 1.0})]
    assert (found := job_in_need(2.0, store.active(), nodes, Limits())) and found.id == waiting.id
    nodes[0] = full
    assert job_in_need(2.0, store.active(), nodes, Limits()) is None, "a gang holds one of the two"
    store.request_cancel(waiting.id)
    assert job_in_need(2.0, store.active(), [full, full], Limits()) is None


def test_datasets_are_mixed_and_validated_on(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler, store: JobStore
) -> None:
    make(client, tmp_path, cluster, reconciler, name="web")
    make(client, tmp_path, cluster, reconciler, name="code", seed=2)
    urls = {name: client.dataset(name).url for name in ("web", "code")}
    data = {
        "source": None,
        "mixture": [
            {"dataset": "web", "weight": 3},
            {"dataset": "code", "weight": 2},
            {"kind": "tokenized", "paths": [urls["web"]], "weight": 1},
        ],
        "validation": [{"name": "code", "dataset": "code"}],
    }
    job = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data=data)
    record = client.submit(job)
    assert client.dry_run(job).spec.data == record.spec.data
    assert [(each.dataset, each.kind, each.paths, each.weight) for each in record.spec.data.mixture] == [
        ("web", "tokenized", (urls["web"],), 3),
        ("code", "tokenized", (urls["code"],), 2),
        (None, "tokenized", (urls["web"],), 1),
    ]
    corpus = load_corpus(record.spec.data, job.training.sequence_length)
    assert [stream.weight for stream in corpus.streams] == [3, 2, 1]
    assert list(corpus.validation) == ["code"]
    for name in urls:
        with pytest.raises(ApiError, match=f"in use by the job {record.id}"):
            client.delete_dataset(name)
    client.cancel(record.id)
    client.delete_dataset("code")
    assert client.clone(record.id, {}).spec.data == record.spec.data, "a clone keeps its shards"
    with pytest.raises(ApiError) as refused:
        client.submit(job)
    assert [error.field for error in refused.value.errors] == ["data.mixture[1].dataset", "data.validation[0].dataset"]
    other = {"dataset": "web", "kind": "tokenized", "paths": [urls["code"]], "weight": 1}
    with pytest.raises(
        ApiError, match=r"data\.mixture\[0\]\.paths: names other shards than those of the dataset 'web'"
    ):
        client.submit(
            tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "mixture": [other]})
        )
    on_web = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data={"source": None, "dataset": "web"})
    space = {"optimizer.learning_rate": {"choices": [0.01, 0.001]}}
    sweep = client.create_sweep(
        {"name": "rates", "job": on_web.model_dump(mode="json"), "search": "grid", "space": space}
    )
    for active in store.active():
        client.cancel(active.id)
    with pytest.raises(ApiError, match=f"in use by the sweep {sweep.id}"):
        client.delete_dataset("web")
    client.create_dataset(request(tmp_path, "code"))
    with pytest.raises(ApiError, match=r"data\.mixture\[1\]\.dataset: the dataset 'code' is BUILDING"):
        client.dry_run(job)


def test_anothers_dataset_is_not_mixed(
    client_with: With, store: JobStore, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    DatasetStore(store).create(DatasetRequest.model_validate(request(tmp_path)), "/checkpoints", Owner("lab", "alice"))
    reconciler.tick()
    cluster.make()
    reconciler.tick()
    data = {"source": None, "mixture": [{"dataset": "corpus-v1", "weight": 1}]}
    job = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data=data)
    missing = {}
    for tenant in ("lab", "other"):
        body = job.model_dump(mode="json", exclude_unset=True)
        answer = client_with(Scope.SUBMIT, tenant=tenant).post("/v1/jobs/dry-run", json=body)
        missing[tenant] = [
            each["field"] for each in answer.json()["errors"] if "there is no dataset" in each["message"]
        ]
    assert missing == {"lab": [], "other": ["data.mixture[0].dataset"]}


def test_datasets_of_different_tokenizers_are_refused_together(
    client: Client, tmp_path: Path, cluster: Cluster, reconciler: DatasetReconciler
) -> None:
    make(client, tmp_path, cluster, reconciler, name="bytes")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_bpe([path.read_bytes() for path in sorted((tmp_path / "corpus").iterdir())], 300))
    make(client, tmp_path, cluster, reconciler, name="bpe", tokenizer=str(tokenizer))
    data = {"source": None, "mixture": [{"dataset": name, "weight": 1} for name in ("bytes", "bpe")]}
    job = tiny_job(tmp_path / "corpus", tmp_path / "checkpoints", data=data, model={"vocab_size": 512})
    with pytest.raises(ApiError, match=r"data\.mixture\[1\]\.paths: .* were made by different tokenizers"):
        client.dry_run(job)
