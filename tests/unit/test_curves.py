"""Events as points of curves."""

from datetime import UTC, datetime
from typing import Any

from service.jobs.model import JobEvent
from service.trackers.curves import entry_of, settings_of
from tests.service.records import a_restart, a_spec, a_step, an_evaluation


def an_event(kind: str, data: dict[str, Any], event_id: int = 1) -> JobEvent:
    return JobEvent(id=event_id, job_id="job-1", kind=kind, time=datetime(2026, 3, 1, tzinfo=UTC), data=data)


def test_each_number_of_a_step_is_a_curve() -> None:
    entry = entry_of(an_event("progress", a_step(3, model_flops_utilization=None).model_dump()), {})
    assert entry.step == 3
    assert entry.values["train/loss"] == 4.7
    assert entry.values["train/exposed_communication_share"] == 0.25
    assert {"train/step", "train/eta_seconds", "train/model_flops_utilization"}.isdisjoint(entry.values)


def test_named_things_are_curves_of_their_names() -> None:
    sets = [{"name": "code", "loss": 1.5}, {"name": "web", "loss": "NaN"}]
    entry = entry_of(an_event("evaluation", an_evaluation(4).model_dump() | {"sets": sets}), {})
    assert entry.values["validation/loss"] == 2.5
    assert entry.values["validation/code/loss"] == 1.5
    assert entry.values["validation/web/loss"] != entry.values["validation/web/loss"]  # not a number


def test_a_step_that_is_done_again_has_no_points() -> None:
    marks: dict[str, int] = {}
    for step in (1, 2, 3):
        assert entry_of(an_event("progress", a_step(step).model_dump()), marks).values
    assert not entry_of(an_event("progress", a_step(2).model_dump()), marks).values
    assert entry_of(an_event("evaluation", an_evaluation(2).model_dump()), marks).values, "that is another curve"
    said = entry_of(an_event("state", {"state": "RUNNING", "message": "2 workers train"}), marks)
    assert (said.step, said.text, said.state) == (3, "RUNNING: 2 workers train", "RUNNING")


def test_settings_are_named_by_their_paths() -> None:
    settings = settings_of(a_spec())
    assert settings["training.steps"] == 10
    assert settings["data.source.paths"] == '["boost_core/**/*.py"]'
    assert "elasticity" not in settings


def test_a_restart_is_told_in_words_whoever_reported_it() -> None:
    entry = entry_of(an_event("restart", a_restart(3).model_dump(mode="json")), {})
    assert entry.text and entry.text.startswith("continues after ") and not entry.values
    of_another_version = {"kind": "restart", "step": 3, "message": "rank 1 was killed", "mood": "good"}
    assert entry_of(an_event("restart", of_another_version), {}).text == "restart: rank 1 was killed"
