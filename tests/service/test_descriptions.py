"""Group, tags and notes of jobs: given with a job, changed at any time, and searched, on both databases."""

from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from service.accounts.keys import KeyStore
from service.client import ApiError, Client
from service.jobs.model import Owner
from service.jobs.patch import JobPatch
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from service.models.access import Scope
from tests.service.command_line import boost_at, job_file
from tests.service.conftest import RunningApi
from tests.service.records import GOOD, a_spec, finish, start

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    return request.param


def names(client: Client, **filters: object) -> list[str]:
    return [job.name for job in client.list(**filters).jobs]


@pytest.mark.full
def test_jobs_are_found_by_how_they_are_described(api: RunningApi, store: JobStore) -> None:
    for name, group, tags, notes in (
        ("first", "sweep-1", ["lr", "Base_line"], "Diverged after the warm-up."),
        ("second", "sweep-1", ["lr"], "100% better"),
        ("third", None, ["baseXline"], ""),
    ):
        store.create(a_spec(name=name, group=group, tags=tags, notes=notes), "/checkpoints")
    with Client(api.url) as client:
        assert names(client, group="sweep-1") == ["second", "first"]
        assert names(client, group="sweep") == []
        assert names(client, tags=["lr"]) == ["second", "first"]
        assert names(client, tags=["LR", "base_line"]) == ["first"]
        assert names(client, tags=["l"]) == []
        assert names(client, search="WARM") == ["first"]
        assert names(client, search="SWEEP-1", tags=["base_line"]) == ["first"]
        assert names(client, search="baseX") == names(client, search="hir") == ["third"]
        assert names(client, search="0% b") == ["second"]
        assert names(client, search="%") == ["second"]
        with pytest.raises(ApiError, match="letters, digits"):
            client.list(tags=["a b"])


@pytest.mark.full
def test_a_search_reads_some_jobs_a_page(api: RunningApi, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.queries.MOST_SEARCHED", 3)
    made = [store.create(a_spec(name=name), "/checkpoints").id for name in ("a1", "b1", "a2", "b2", "b3", "b4", "a3")]
    store.request_cancel(made[2])
    with Client(api.url) as client:
        for filters, expected in (
            ({"search": "a"}, [["a3"], ["a2"], ["a1"]]),
            ({"name": "a", "limit": 1}, [["a3"], ["a2"], ["a1"]]),
            ({"name": "a", "states": ["QUEUED", "CANCELLED"]}, [["a3"], ["a2", "a1"], []]),
            ({"name": "a", "states": ["CANCELLED"]}, [["a2"]]),
            ({"name": "none"}, [[], [], []]),
        ):
            pages, cursor = [], None
            while True:
                page = client.list(cursor=cursor, **filters)
                pages.append([job.name for job in page.jobs])
                if (cursor := page.next_cursor) is None:
                    break
            assert pages == expected, filters
        assert client.list(limit=7).next_cursor is None, "no search"


@pytest.mark.full
def test_a_description_is_changed_at_any_time_and_nothing_else_after_the_end(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(group="old", tags=["a"]), "/checkpoints")
    finish(store, start(store, job.id).id)
    with Client(api.url) as client:
        changed = client.patch(job.id, {"group": "", "tags": ["b", "c"], "notes": "The best.\nSo far."})
        assert (changed.spec.group, changed.spec.tags, changed.spec.notes) == (None, ("b", "c"), "The best.\nSo far.")
        assert changed.state == "SUCCEEDED"
        assert names(client, tags=["c"], search="so far") == ["tiny"]
        assert names(client, group="old") == names(client, tags=["a"]) == []
        (event,) = client.events(job.id, follow=False, kinds=["patch"])
        assert event.data["group"] == {"from": "old", "to": None}
        assert event.data["tags"] == {"from": ["a"], "to": ["b", "c"]}
        with pytest.raises(ApiError, match="except for its group, tags and notes"):
            client.patch(job.id, {"tags": [], "priority": 1})
        for changes, field in (
            ({"tags": ["b b"]}, "tags[0]"),
            ({"notes": "\0"}, "notes"),
            ({"group": "x" * 64}, "group"),
        ):
            with pytest.raises(ApiError) as refused:
                client.patch(job.id, changes)
            assert [error.field for error in refused.value.errors] == [field]
        assert client.patch(job.id, {"tags": []}).spec.tags == ()


def test_without_a_description_a_job_is_stored_as_the_release_before_reads_it(store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    store.patch(job.id, JobPatch(priority=1))
    with store.engine.connect() as connection:
        spec = connection.execute(select(JobRow.spec)).scalar_one()
    assert spec["priority"] == 1
    assert not {"group", "tags", "notes"} & spec.keys()


@pytest.mark.full
def test_the_command_line_describes_and_finds(api: RunningApi, store: JobStore, tmp_path: Path) -> None:
    boost = boost_at(api.url)
    file = job_file(tmp_path, GOOD | {"tags": ["file"], "group": "file"})
    submitted = boost("submit", file, "--group", "cli", "--tag", "a", "--tag", "b", "--notes", "As published.")
    assert submitted.exit_code == 0, submitted.output
    (job,) = store.page()[0]
    assert (job.spec.group, job.spec.tags, job.spec.notes) == ("cli", ("a", "b"), "As published.")
    assert boost("patch", job.id, "--tag", "c", "--tag", "a", "--untag", "b", "--notes", "One.\nTwo.").exit_code == 0
    assert store.get(job.id).spec.tags == ("a", "c")
    shown = boost("show", job.id).stdout
    assert "group       cli\ntags        a, c\nnotes       One.\n            Two.\n" in shown
    assert "changed: tags from a b to a c, notes from As published. to One." in boost("events", job.id).stdout
    assert job.id in boost("ls", "--group", "cli", "--tag", "c", "--search", "two").stdout
    assert job.id not in boost("ls", "--tag", "b").stdout
    assert "give --name" in boost("patch", job.id).stderr


@pytest.mark.full
def test_a_search_stays_within_the_tenant(guarded: RunningApi, store: JobStore) -> None:
    store.create(a_spec(tags=["secret"], notes="theirs"), "/checkpoints", Owner("theirs", "x"))
    key = KeyStore(store.engine).create("ours", "ours", [Scope.SUBMIT], None).key
    headers = {"Authorization": f"Bearer {key}"}
    for query in ({"tag": "secret"}, {"search": "theirs"}, {"search": ""}):
        assert httpx.get(f"{guarded.url}/v1/jobs", params=query, headers=headers).json()["jobs"] == []
