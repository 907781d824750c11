"""Curves of several jobs, on both databases: downsampled with their spikes, over any axis, and read once."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import httpx
import pytest

from service.accounts.keys import KeyStore
from service.api.limits import SLOW_THREADS
from service.client import ApiError, Client
from service.jobs.downsampled_curves import MOST_BUCKETS, CurveCache
from service.jobs.model import JobRecord, Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.jobs import Axis, Curve
from tests.service.conftest import RunningApi
from tests.service.records import a_spec, a_step, an_evaluation, start
from tests.service.test_comparison import statements

__all__ = ["statements"]

T0 = datetime(2026, 1, 1, tzinfo=UTC)
VALIDATION = [{"name": "books", "kind": "text", "paths": ["b.txt"]}]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


class Run:
    """A job whose steps take two seconds each."""

    def __init__(self, store: JobStore, name: str = "run", **changes: Any) -> None:
        self.store = store
        self.id = store.create(a_spec(name=name, **changes), "/c").id
        start(store, self.id)
        self._sequence, self._at = 0, self.started

    @property
    def started(self) -> datetime:
        started = self.store.get(self.id).started_at
        assert started
        return started

    def report(self, *reports: Any) -> None:
        numbered = []
        for report in reports:
            self._sequence += 1
            self._at += timedelta(seconds=2 * (report.kind == "progress"))
            numbered.append((self._sequence, self._at, report))
        self.store.append_reports(self.id, 1, numbered)

    def steps(self, first: int, last: int, **losses: float) -> None:
        """Losses of 1, but for those given as ``s5=7.0`` at step 5."""
        self.report(*(a_step(step, loss=losses.get(f"s{step}", 1.0)) for step in range(first, last + 1)))

    def curve(self, cache: CurveCache, metric: str = "loss", axis: Axis = Axis.STEP, points: int = 500) -> Curve:
        return cache.curve(self.store.get(self.id), metric, axis, points, -math.inf, math.inf)


@pytest.mark.full
def test_a_spike_of_one_step_stays_visible_in_few_points(store: JobStore) -> None:
    run = Run(store)
    run.steps(1, 1000, s501=9.0, s502=0.25)
    curve = run.curve(CurveCache(store.engine), points=10)
    assert len(curve.x) == 10
    assert (max(filter(None, curve.max)), min(filter(None, curve.min))) == (9.0, 0.25)
    assert [each for each in curve.mean if each != 1.0] == [1.0725]
    assert (curve.x[-1], sorted(curve.x)) == (1000, curve.x)


@pytest.mark.full
def test_curves_are_also_given_as_csv(api: RunningApi, store: JobStore) -> None:
    run = Run(store)
    run.steps(1, 4, s3=math.nan)
    of_jobs = httpx.get(f"{api.url}/v1/jobs/compare/curves", params={"job": run.id, "format": "csv"})
    assert of_jobs.headers["content-type"] == "text/csv; charset=utf-8"
    heading, _, second, third, _ = of_jobs.text.splitlines()
    assert heading == "id,step,loss_mean,loss_min,loss_max"
    assert (second, third) == (f"{run.id},2.0,1.0,1.0,1.0", f"{run.id},3.0,,,")
    with Client(api.url) as client:
        assert client.compare_curves([run.id]).as_csv() == of_jobs.text
        lines = client.metrics(run.id).as_csv().splitlines()
    assert lines == httpx.get(f"{api.url}/v1/jobs/{run.id}/metrics?format=csv").text.splitlines()
    assert lines[0].startswith("step,time,loss,loss_min,") and lines[4].startswith("4,2") and ",,," in lines[3]


def test_only_new_events_are_read_and_nothing_of_a_job_that_is_the_same(
    store: JobStore, statements: list[tuple[str, object]]
) -> None:
    run, cache = Run(store), CurveCache(store.engine)
    run.steps(1, 20, s3=float("nan"), s4=float("inf"))
    assert run.curve(cache).mean == [1.0, 1.0, None, None, *[1.0] * 16]
    statements.clear()
    assert len(run.curve(cache).x) == 20
    assert not [text for text, _ in statements if "FROM events" in text]
    run.steps(21, 25, s21=2.0)
    statements.clear()
    assert run.curve(cache) == run.curve(CurveCache(store.engine))
    newer, everything = [values for text, values in statements if "FROM events" in text]
    assert str(newer) != str(everything)  # from the newest event that was read, and from the first


@pytest.mark.full
def test_a_curve_of_many_steps_keeps_within_its_buckets(store: JobStore) -> None:
    run, cache, steps = Run(store), CurveCache(store.engine), 2 * MOST_BUCKETS + 2
    for first in range(1, steps, 1000):
        run.steps(first, min(first + 999, steps), s5=8.0)
        run.curve(cache)
    (kept,) = cache._kept.values()
    assert (kept.width, kept.table.shape) == (4, (5, steps // 4 + 1))
    curve = run.curve(cache, points=2000)
    assert (curve.x[-1], max(filter(None, curve.max)), curve.mean[-1]) == (steps, 8.0, 1.0)
    assert curve == run.curve(CurveCache(store.engine), points=2000)
    few = CurveCache(store.engine, most=1)
    other = Run(store, "other")
    other.steps(1, 2)
    assert (run.curve(few).x[-1], other.curve(few).x, len(few._kept)) == (steps, [1, 2], 1)


def test_a_long_course_is_read_in_parts_of_which_none_is_read_again(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = Run(store), CurveCache(store.engine)
    run.steps(1, 25, s3=7.0, s21=9.0)
    whole = run.curve(CurveCache(store.engine))
    monkeypatch.setattr("service.jobs.downsampled_curves._MOST_READ", 10)
    read, more = list[int](), CurveCache._with_more

    def interrupted(self: CurveCache, buckets: Any, *job: Any) -> Any:
        read.append(buckets.newest)
        if len(read) == 2:
            raise TimeoutError
        return more(self, buckets, *job)

    monkeypatch.setattr(CurveCache, "_with_more", interrupted)
    with pytest.raises(TimeoutError):
        run.curve(cache)
    assert run.curve(cache) == whole
    assert len(read) == 4
    assert read[0] < read[1] == read[2] < read[3]


def test_steps_that_are_done_again_count_both_times(store: JobStore) -> None:
    run = Run(store)
    run.steps(1, 10, s8=5.0)
    run.steps(6, 8)
    cache = CurveCache(store.engine)
    curve = run.curve(cache)
    assert (curve.x, curve.max[7], curve.mean[7]) == ([*range(1, 11)], 5.0, 3.0)
    seconds = run.curve(cache, axis=Axis.SECONDS).x
    assert seconds == pytest.approx([2, 4, 6, 8, 10, 22, 24, 26, 26, 26], abs=0.01)


@pytest.mark.full
def test_jobs_are_compared_by_tags_that_only_old_ones_have(
    api: RunningApi, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.queries.MOST_SEARCHED", 3)
    old = [store.create(a_spec(tags=["paper"]), "/c").id for _ in range(2)]
    newer = [store.create(a_spec(), "/c").id for _ in range(8)]
    with Client(api.url) as client:
        assert [job.id for job in client.compare(tags=["paper"]).jobs] == old[::-1]
        assert [curve.id for curve in client.compare_curves(tags=["paper"]).curves] == old[::-1]
        monkeypatch.setattr("service.api.routes.jobs.MOST_COMPARED", 5)
        assert [job.id for job in client.compare(search="tiny").jobs] == newer[:2:-1]


@pytest.mark.full
def test_curves_are_over_tokens_flops_and_time(api: RunningApi, store: JobStore) -> None:
    run = Run(store, data={"source": {"kind": "standard_library"}, "validation": VALIDATION}, group="g", tags=["a"])
    waiting = store.create(a_spec(name="waiting", group="g"), "/c").id
    run.steps(1, 8)
    run.report(an_evaluation(4, 2.0, ("books",)), an_evaluation(8, float("nan"), ("books",)))
    with Client(api.url) as client:
        for axis, each in (("step", 1), ("tokens", 1024), ("flops", 1024 * 1e9 / 2048), ("seconds", 2)):
            (curve,) = client.compare_curves([run.id], axis=axis).curves
            assert curve.x == pytest.approx([each * step for step in range(1, 9)], rel=1e-3), axis
            (validation,) = client.compare_curves([run.id], "validation_loss", axis).curves
            assert (validation.x, validation.mean) == (pytest.approx([4 * each, 8 * each], rel=1e-3), [2.0, None])
        part = client.compare_curves([run.id], axis="tokens", low=3000, high=5000).curves[0]
        assert part.x == [2048, 3072, 4096, 5120]  # and one on each side
        both = client.compare_curves(metric="validation_loss/books", group="g").curves
        assert [(one.id, one.mean) for one in both] == [(waiting, []), (run.id, [2.5, None])]
        assert [one.mean for one in client.compare_curves(metric="validation_loss/none", tags=["a"]).curves] == [
            [None] * 2
        ]
        assert [one.id for one in client.compare_curves(search="WAIT").curves] == [waiting]
        assert [one.id for one in client.compare(group="g", tags=["a"]).jobs] == [run.id]
        assert client.compare([run.id]).jobs[0].validation_sets == ["books"]


def test_tokens_follow_smaller_batches_at_the_start_and_what_came_before(store: JobStore) -> None:
    stages = [{"until_step": 4, "global_batch_size": 4}]
    batches = {"global_batch_size": 16, "micro_batch_size": 4, "batch_size_warmup": stages}
    run = Run(store, training={"steps": 10, "sequence_length": 64, **batches})
    before = 5000  # of the checkpoint that it continues from
    tokens = [before + 64 * (4 * min(step, 4) + 16 * max(0, step - 4)) for step in range(1, 9)]
    run.report(*(a_step(step, tokens=each) for step, each in enumerate(tokens, 1)))
    cache = CurveCache(store.engine)
    assert run.curve(cache, axis=Axis.TOKENS).x == tokens
    assert run.curve(cache, axis=Axis.FLOPS).x == [each * 1e9 / 2048 for each in tokens]


def test_too_much_is_refused(api: RunningApi, store: JobStore) -> None:
    ids = [store.create(a_spec(name=f"{number}"), "/c").id for number in range(51)]
    with Client(api.url) as client:
        assert len(client.compare_curves(ids).curves) == 51
        with pytest.raises(ApiError, match="51 jobs is more than 100000 points") as refused:
            client.compare_curves(ids, points=2000)
        assert refused.value.status == 422
        for wrong in ({"points": 2001}, {"metric": "data"}, {"axis": "luck"}, {"job": ["x"] * 201}):
            assert httpx.get(f"{api.url}/v1/jobs/compare/curves", params=wrong).status_code == 422, wrong


@pytest.mark.full
def test_curves_that_take_long_hold_up_nothing_else(
    api: RunningApi, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, go_on, reading = store.create(a_spec(), "/c").id, Event(), list[str]()
    curve = CurveCache.curve

    def slow(self: CurveCache, job: JobRecord, *which: Any, **how: Any) -> Curve:
        reading.append(job.id)
        assert go_on.wait(30)
        return curve(self, job, *which, **how)

    monkeypatch.setattr(CurveCache, "curve", slow)
    with ThreadPoolExecutor(60) as pool:
        answers = [
            pool.submit(httpx.get, f"{api.url}/v1/jobs/compare/curves?job={job_id}", timeout=60) for _ in range(60)
        ]
        try:
            while not reading:
                time.sleep(0.01)
            time.sleep(0.5)  # for all of them to come
            cancelled = httpx.post(f"{api.url}/v1/jobs/{job_id}/cancel", timeout=10)
            begun = len(reading)
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert (cancelled.status_code, begun) == (202, SLOW_THREADS)


@pytest.mark.full
def test_other_tenants_curves_are_not_found(guarded: RunningApi, store: JobStore) -> None:
    ours, theirs = (
        store.create(a_spec(name=name, group="g", tags=["t"]), "/c", Owner(name, "x")) for name in ("ours", "theirs")
    )
    headers = {"Authorization": f"Bearer {KeyStore(store.engine).create('k', 'ours', [Scope.READ], None).key}"}
    url = f"{guarded.url}/v1/jobs/compare/curves"
    named = httpx.get(url, params={"job": [ours.id, theirs.id]}, headers=headers)
    assert (named.status_code, named.json()["code"]) == (404, "job-not-found")
    for which in ({"group": "g"}, {"tag": "t"}, {"search": "s"}):
        found = httpx.get(url, params=which | {"tenant": "theirs"}, headers=headers)
        assert [curve["id"] for curve in found.json()["curves"]] == [ours.id]
