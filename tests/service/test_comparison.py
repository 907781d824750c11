"""Jobs side by side: in what their specs differ."""

import json
from pathlib import Path

import httpx

from boost_core.config import Layout
from service.accounts.keys import KeyStore
from service.client import Client
from service.jobs.comparison import differing_fields
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.command_line import boost_at, job_file
from tests.service.conftest import RunningApi
from tests.service.records import GOOD, a_spec


def test_only_what_differs_is_listed_by_its_path_and_what_only_follows_is_told_apart() -> None:
    before = a_spec(model={"preset": "60m"}, tags=["a", "b"], data={"validation": []})
    after = a_spec(
        model={"preset": "130m", "rank": 96},
        tags=["a"],
        data={"validation": [{"name": "books", "kind": "text", "paths": ["b.txt"]}]},
        resources={"node_labels": {"pool": "x"}},
    )
    fields = {each.field: each for each in differing_fields([before, after])}
    submitted = {field: each.values for field, each in fields.items() if each.submitted}
    assert submitted["model.preset"] == ["60m", "130m"]
    assert submitted["model.rank"] == [before.model.rank, 96]
    assert submitted["tags"] == [["a", "b"], ["a"]]
    assert submitted["data.validation[0].name"] == [None, "books"]
    assert submitted["resources.node_labels.pool"] == [None, "x"]
    follows = {field: each.values for field, each in fields.items() if not each.submitted}
    assert follows["model.hidden_size"] == [before.model.hidden_size, after.model.hidden_size]
    assert not [field for field in fields if field.startswith(("training", "optimizer", "name"))]
    assert differing_fields([before, before]) == []


def test_layouts_that_the_service_has_chosen_are_not_its_users() -> None:
    job = a_spec(elasticity={"layouts": "auto", "gpus": {"min": 1, "max": 2}}, parallelism={})
    (field,) = differing_fields([job.with_layouts((Layout(1, 1, 1),)), job.with_layouts((Layout(2, 1, 1),))])
    assert (field.field, field.values, field.submitted) == ("elasticity.resolved", [[[1, 1, 1]], [[2, 1, 1]]], False)


def test_two_jobs_and_job_files_are_compared(api: RunningApi, store: JobStore, tmp_path: Path) -> None:
    job = store.create(a_spec(), "/checkpoints")
    clone = store.create(a_spec(name="longer", training={"steps": 500, "sequence_length": 64}), "/checkpoints")
    with Client(api.url) as client:
        result = client.diff(job.id, clone.id)
    assert result.jobs == [job.id, clone.id]
    assert {each.field: each.values for each in result.fields} == {
        "name": ["tiny", "longer"],
        "training.steps": [10, 500],
    }
    boost = boost_at(api.url)
    assert json.loads(boost("diff", job.id, clone.id, "--json").stdout) == result.model_dump(mode="json")
    file = job_file(tmp_path, GOOD | {"model": {"preset": "60m"}})
    shown = boost("diff", file, job.id).stdout
    assert "model.preset" in shown.split("FOLLOWS FROM THESE")[0]
    assert "model.hidden_size" in shown.split("FOLLOWS FROM THESE")[1]
    assert boost("diff", job.id, job.id).stdout == "no field differs\n"
    missing = boost("diff", job.id, str(tmp_path / "absent.yaml"))
    assert (missing.exit_code, "absent.yaml" in missing.stderr) == (2, True)


def test_other_tenants_jobs_are_not_compared_with(guarded: RunningApi, store: JobStore) -> None:
    ours, theirs = (store.create(a_spec(name=name), "/checkpoints", Owner(name, "x")) for name in ("ours", "theirs"))
    headers = {"Authorization": f"Bearer {KeyStore(store.engine).create('k', 'ours', [Scope.READ], None).key}"}
    for first, second in ((ours, theirs), (theirs, ours)):
        answer = httpx.get(f"{guarded.url}/v1/jobs/{first.id}/diff/{second.id}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "job-not-found")
