"""Profiles of kinds of GPU in the record: who stores them, how, and which jobs they are for."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text

from boost_core.config import JobSpec
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.machine import Basis, machine_of
from boost_core.plan.report import Plan, plan
from boost_core.plan.resolve import choose_layouts
from boost_core.plan.search import PlanSearch, search_report
from service.client import ApiError, Client
from service.jobs.database import migrate, open_engine
from service.jobs.profiles import ProfileNotFound, ProfileStore
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.command_line import boost_at, job_file
from tests.service.concurrency import in_threads
from tests.service.conftest import RunningApi, With
from tests.service.records import PROFILE, a_spec

BODY = PROFILE.model_dump(mode="json")
IN_FP32 = PROFILE.model_copy(update={"precision": "fp32", "product_flops": 5e12})
A100 = PROFILE.model_copy(update={"device": "NVIDIA A100-SXM4-80GB", "precision": "fp32"})


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def profiles(store: JobStore) -> ProfileStore:
    return ProfileStore(store.engine)


def on(precision: str = "bf16", **resources: Any) -> JobSpec:
    """A job on GPUs that more of them make faster if they are slow."""
    return a_spec(
        resources={"gpus_per_worker": 1} | resources,
        training={
            "steps": 10, "sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 1, "precision": precision,
        },
    )  # fmt: skip


def test_a_profile_is_kept_until_another_takes_its_place(profiles: ProfileStore) -> None:
    first = profiles.put("H100", PROFILE, "ops")
    assert profiles.get("H100") == first
    profiles.put("A100", A100, "ann")
    second = profiles.put("H100", PROFILE.model_copy(update={"spread": 0.3}), "ann")
    assert [(each.kind, each.stored_by, each.profile.spread) for each in profiles.list()] == [
        ("A100", "ann", 0.1),
        ("H100", "ann", 0.3),
    ]
    assert second.stored_at > first.stored_at
    profiles.delete("H100")
    for missing in (partial(profiles.get, "H100"), partial(profiles.delete, "H100")):
        with pytest.raises(ProfileNotFound, match="there is no profile of 'H100'; boost profiles ls lists"):
            missing()


def test_each_precision_has_its_own(profiles: ProfileStore) -> None:
    in_fp32 = profiles.put("H100", IN_FP32, "ops")
    assert profiles.get("H100") == in_fp32
    in_bf16 = profiles.put("H100", PROFILE, "ops")
    assert list(profiles.list()) == [in_bf16, in_fp32]
    assert [profiles.get("H100", precision) for precision in (None, "bf16", "fp32")] == [in_bf16, in_bf16, in_fp32]
    found = [profiles.for_job(on(precision, accelerator_type="H100")) for precision in ("bf16", "fp32")]
    assert found == [in_bf16, in_fp32]
    profiles.delete("H100", "fp32")
    with pytest.raises(ProfileNotFound, match="there is no profile of 'H100' in fp32"):
        profiles.get("H100", "fp32")
    assert list(profiles.list()) == [in_bf16]
    profiles.put("H100", IN_FP32, "ops")
    profiles.delete("H100")
    assert list(profiles.list()) == []


@pytest.mark.full
def test_a_record_of_one_profile_for_each_kind_is_read(empty_database_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    engine = open_engine(empty_database_url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0011")
        for kind, profile in (("H100", PROFILE), ("A100", A100)):
            row = {"kind": kind, "profile": profile.model_dump_json(), "stored_at": "2026-01-01 00:00:00+00:00"}
            values = "VALUES (:kind, :stored_at, 'ops', :profile)"
            connection.execute(text(f"INSERT INTO profiles (kind, stored_at, stored_by, profile) {values}"), row)
    migrate(empty_database_url)
    profiles = ProfileStore(engine)
    assert [(each.kind, each.stored_by, each.profile) for each in profiles.list()] == [
        ("A100", "ops", A100),
        ("H100", "ops", PROFILE),
    ]
    assert profiles.get("A100", "fp32").stored_at == datetime(2026, 1, 1, tzinfo=UTC)
    profiles.put("H100", IN_FP32, "ops")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0011")
        kept = connection.execute(text("SELECT kind, profile FROM profiles ORDER BY kind")).all()
    assert [kind for kind, _ in kept] == ["A100", "H100"]
    assert "bf16" in str(kept[1].profile)
    engine.dispose()


def test_of_several_first_ones_at_once_the_last_stays(profiles: ProfileStore) -> None:
    assert in_threads(6, lambda number: profiles.put("H100", PROFILE, f"key {number}")) == []
    (kept,) = profiles.list()
    assert kept.profile == PROFILE


def test_a_job_has_the_profile_of_the_gpu_that_it_asks_for(profiles: ProfileStore) -> None:
    stored = profiles.put("H100", PROFILE, "ops")
    profiles.put("A100", A100, "ops")
    for spec in (on(accelerator_type="H100"), on(node_labels={ACCELERATOR_LABEL: "H100"})):
        assert profiles.for_job(spec) == stored
        assert machine_of(spec, PROFILE).cluster == machine_of(on(accelerator_type="H100"), PROFILE).cluster
    without = {
        "no profile": on(accelerator_type="H200"),
        "another precision": on(accelerator_type="A100"),
        "any kind": on(),
        "no GPU": on(gpus_per_worker=0, node_labels={ACCELERATOR_LABEL: "H100"}),
    }
    assert {why: profiles.for_job(spec) for why, spec in without.items()} == dict.fromkeys(without)


@pytest.mark.full
def test_operators_store_what_everybody_reads(client_with: With) -> None:
    operator, reader = client_with(Scope.ADMIN, name="ops"), client_with(Scope.READ, tenant="lab")
    stored = operator.put("/v1/profiles/H100", json=BODY)
    assert stored.status_code == 200, stored.text
    assert stored.json().items() >= {"kind": "H100", "stored_by": "ops", "profile": BODY}.items()
    assert operator.put("/v1/profiles/H100", json=BODY).status_code == 200
    seen = reader.get("/v1/profiles/H100").json()
    assert (seen["profile"], seen["stored_by"]) == (BODY, None), "an operator's key is no reader's business"
    assert operator.get("/v1/profiles").json()["profiles"][0]["stored_by"] == "ops"
    assert [each["kind"] for each in reader.get("/v1/profiles").json()["profiles"]] == ["H100"]
    for refused in (reader.put("/v1/profiles/H100", json=BODY), reader.delete("/v1/profiles/H100")):
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert operator.delete("/v1/profiles/H100").status_code == 204
    missing = [reader.get("/v1/profiles/H100"), operator.delete("/v1/profiles/H100")]
    assert [(answer.status_code, answer.json()["code"]) for answer in missing] == [(404, "profile-not-found")] * 2
    audited = [(entry["action"], entry["status"]) for entry in operator.get("/v1/audit").json()["entries"]]
    assert audited == [
        ("profile.put", 200), ("profile.put", 200), ("profile.put", 403), ("profile.delete", 403),
        ("profile.delete", 204), ("profile.delete", 404),
    ]  # fmt: skip


@pytest.mark.parametrize("database", ["sqlite"])
@pytest.mark.parametrize(
    ("kind", "changes", "field", "message"),
    [
        ("A100", {}, "device", "was measured on 'NVIDIA H100 80GB HBM3', not on A100 GPUs"),
        ("h100", {}, "device", "as Ray writes H100; store it under that"),
        ("H200", {"device": "NVIDIA GH200 480GB"}, "device", "not on H200 GPUs"),
        ("H100", {"product_flops": 0}, "product_flops", "greater than or equal to 1"),
        ("H100", {"bandwidth": "fast"}, "bandwidth", "must be a number"),
        ("H100", {"spread": None}, "spread", "must be a number"),
        ("H100", {"measured_at": 1767225600}, "measured_at", "must be a time such as"),
        ("H100", {"cases": ["a case"] * 65}, "cases", "at most 64 entries"),
        ("H100", {"commit": "0" * 201}, "commit", "at most 200 characters"),
        ("H100", {"nodes": 8}, "nodes", "there is no such field"),
        ("H%20100", {}, "kind", "Ray's name for it, such as H100"),
    ],
)
def test_what_is_no_profile_of_the_kind_is_refused(
    api: RunningApi, kind: str, changes: dict[str, Any], field: str, message: str
) -> None:
    answer = httpx.put(f"{api.url}/v1/profiles/{kind}", json=BODY | changes)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert (error["field"], message in error["message"]) == (field, True), error
    assert httpx.get(f"{api.url}/v1/profiles").json() == {"profiles": []}


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_body_that_no_profile_needs_is_not_read(api: RunningApi) -> None:
    answer = httpx.put(f"{api.url}/v1/profiles/H100", json=BODY | {"cases": ["x" * 2**20]})
    assert (answer.status_code, answer.json()["code"]) == (413, "body-too-large")


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite"])
def test_the_command_line(api: RunningApi, client: Client, tmp_path: Path) -> None:
    boost: Callable[..., Any] = boost_at(api.url)
    file = tmp_path / "h100.json"
    file.write_text(PROFILE.model_dump_json(indent=2))
    stored = boost("profiles", "set", "H100", file)
    assert stored.stdout == "jobs in bf16 on H100 are now planned with what was measured on NVIDIA H100 80GB HBM3\n", (
        stored.output
    )
    assert client.stored_profile("H100").profile == PROFILE
    header, line = boost("profiles", "ls").stdout.splitlines()
    assert header.split() == ["KIND", "PRECISION", "MEASURED", "COMMIT", "STORED", "BY", "DEVICE"]
    assert line.split()[:4] == ["H100", "bf16", "2026-01-01", "0123456789ab"]
    shown = boost("profiles", "show", "H100").stdout
    assert "products      10 TFLOP/s" in shown
    assert "by anonymous" in shown
    assert json.loads(boost("profiles", "show", "H100", "--json").stdout)["profile"] == BODY
    assert json.loads(boost("profiles", "ls", "--json").stdout)["profiles"][0]["kind"] == "H100"
    other = boost("profiles", "set", "A100", file)
    assert (other.exit_code, "device: was measured on 'NVIDIA H100 80GB HBM3', not on A100 GPUs" in other.stderr) == (
        2,
        True,
    )
    file.write_text("{}")
    assert (boost("profiles", "set", "H100", file).exit_code, client.stored_profile("H100").profile) == (2, PROFILE)
    file.write_text(IN_FP32.model_dump_json())
    assert boost("profiles", "set", "H100", file).exit_code == 0
    assert [line.split()[:2] for line in boost("profiles", "ls").stdout.splitlines()[1:]] == [
        ["H100", "bf16"],
        ["H100", "fp32"],
    ]
    assert "products      5 TFLOP/s" in boost("profiles", "show", "H100", "--precision", "fp32").stdout
    assert boost("profiles", "show", "H100", "--precision", "fp8").exit_code == 2
    deleted = boost("profiles", "rm", "H100", "--precision", "fp32").stdout
    assert deleted == "deleted the profile of H100 in fp32\n"
    assert client.stored_profile("H100").profile == PROFILE
    assert boost("profiles", "rm", "H100").stdout == "deleted all profiles of H100\n"
    with pytest.raises(ApiError, match="there is no profile of 'H100'"):
        client.stored_profile("H100")
    assert boost("profiles", "show", "H100").exit_code == 1


@pytest.mark.parametrize("database", ["sqlite"])
@pytest.mark.nightly
def test_plans_go_by_the_profile_of_the_jobs_gpu(api: RunningApi, client: Client, tmp_path: Path) -> None:
    job, asked = on(accelerator_type="H100"), PlanSearch(gpus=4)
    assumed = client.plan(job, asked)
    assert (assumed.provenance, assumed.profile, assumed.search.provenance) == ("assumed", None, "assumed")
    stored = client.put_profile("H100", PROFILE)
    found = client.plan(job, asked)
    assert found.profile == stored
    expected = plan(job, machine_of(job, PROFILE))
    assert found.model_dump(include=Plan.model_fields.keys()) == expected.model_dump()
    assert found.shapes[0].step_seconds > assumed.shapes[0].step_seconds
    assert "measured 2026-01-01 at 0123456789ab" in found.notes[1]
    assert found.search == search_report(job, PlanSearch(gpus=4, profile=PROFILE))
    given = PROFILE.model_copy(update={"spread": 0.5})
    by_its_own = client.plan(job, PlanSearch(gpus=4, profile=given))
    assert by_its_own.profile is None, "the one that comes with the request goes first"
    assert by_its_own.search == search_report(job, PlanSearch(gpus=4, profile=given))
    assert client.plan(on("fp32", accelerator_type="H100")).provenance == "assumed"

    boost: Callable[..., Any] = boost_at(api.url)
    file = job_file(tmp_path, job.model_dump(mode="json"))
    for options, said in ((), "four in five from"), (("--gpus", "4"), "times are from a measured profile"):
        planned = boost("plan", file, "--service", *options)
        assert planned.exit_code == 0, planned.output
        assert said in planned.stdout
        assert "from the service's profile of H100: NVIDIA H100 80GB HBM3, stored 20" in planned.stdout
    shown = json.loads(boost("plan", file, "--service", "--json").stdout)
    assert (shown["profile"]["stored_by"], shown["provenance"]) == ("anonymous", "measured")
    (tmp_path / "own.json").write_text(given.model_dump_json())
    refused = boost("plan", file, "--service", "--profile", tmp_path / "own.json")
    assert (refused.exit_code, "takes neither --profile, --cluster nor" in refused.stderr) == (2, True)


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_job_keeps_the_profile_that_it_was_submitted_with(client: Client, profiles: ProfileStore) -> None:
    """Its layouts are chosen by it, whatever becomes of the profile; a clone is planned anew."""
    left = on(accelerator_type="H100").model_dump(mode="json")
    left |= {"parallelism": {}, "elasticity": {"layouts": "auto", "gpus": {"max": 4}}}
    spec = JobSpec.model_validate(left)
    assumed = client.submit(left)
    assert (assumed.profile, assumed.spec.layouts()) == (None, choose_layouts(spec).sizes)
    stored = profiles.put("H100", PROFILE, "ops")
    chosen = choose_layouts(spec, Basis(profile=PROFILE))
    assert chosen.sizes != choose_layouts(spec).sizes, "or nothing is tested here"
    tried = client.dry_run(left)
    kept = stored.for_record
    assert (kept.stored_by, kept.profile) == (None, PROFILE.model_copy(update={"cases": ()}))
    assert (tried.profile, tried.chosen, tried.plan.provenance) == (kept, chosen, "measured")
    assert client.plan(left).chosen == chosen
    job = client.submit(left)
    assert (job.profile, job.spec.layouts()) == (kept, chosen.sizes)
    (told,) = client.events(job.id, follow=False, kinds=["layouts"])
    assert told.data["provenance"] == "measured"

    profiles.delete("H100")
    assert client.get(job.id).profile == kept
    planned = client.job_plan(job.id)
    assert (planned.profile, planned.provenance, client.plan(job.spec).provenance) == (kept, "measured", "assumed")
    expected = plan(job.spec, machine_of(job.spec, PROFILE))
    assert planned.model_dump(include=Plan.model_fields.keys()) == expected.model_dump()
    larger = client.patch(job.id, {"gpus": {"max": 8}})
    wider = JobSpec.model_validate(left | {"elasticity": {"layouts": "auto", "gpus": {"max": 8}}})
    assert larger.spec.layouts() == choose_layouts(wider, Basis(profile=PROFILE)).sizes
    assert client.clone(job.id).profile is None
