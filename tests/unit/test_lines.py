"""A job's events as lines for people."""

from datetime import UTC, datetime

import pytest

from service.cli.job_text import line_of, report_of
from service.jobs.model import JobEvent
from tests.service.records import a_fault, a_spare


def an_event(kind: str, data: dict) -> JobEvent:
    return JobEvent(id=1, job_id="job-1", kind=kind, time=datetime.now(UTC), data=data)


def test_a_fault() -> None:
    event = an_event("fault", a_fault().model_dump())
    assert report_of(event) == a_fault()
    assert line_of(event).endswith("  step 3  slow rank: rank 1 computes 75% of the step")


def test_a_spare_copy() -> None:
    kept, gone = (line_of(an_event("spare", a_spare(step).model_dump())) for step in (3, None))
    assert kept.endswith("  step 3  spare copy of the state on node node-z")
    assert gone.endswith("  no spare copy of the state is kept any more")


@pytest.mark.parametrize("change", [{"what": "cosmic_ray"}, {"since": "yesterday"}])
def test_what_only_a_newer_service_says_is_shown_as_it_is(change: dict) -> None:
    event = an_event("fault", a_fault().model_dump() | change)
    assert report_of(event) is None
    assert line_of(event).endswith("  fault: rank 1 computes 75% of the step")
    assert line_of(an_event("checkpoint", {"place": "moon"})).endswith("  checkpoint: {'place': 'moon'}")
