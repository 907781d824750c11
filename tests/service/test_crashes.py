"""The service is killed (SIGKILL) at each transition; neither is a job lost nor does anything happen twice."""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from service.jobs.database import migrate
from service.jobs.states import TRANSITIONS, JobState, Reason, next_state
from tests.service.lives import LIVES

pytestmark = pytest.mark.timeout(1200)  # two minutes where nothing else runs

AT_MOST_ONCE = ("launches", "drills")  # what may not have happened yet when its user changed their mind


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lives")
    is_sqlite = request.param == "sqlite"
    url = f"sqlite:///{folder}/boost.db" if is_sqlite else request.getfixturevalue("postgres").create_database()
    migrate(url)
    command = [sys.executable, "-m", "tests.service.lives", url, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    log = (folder / "log").read_text()
    assert (done.returncode, log) == (0, ""), done.stderr + log
    return json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize("life", LIVES)
def test_killed_at_each_point_all_goes_on_as_if_undisturbed(told: dict[str, Any], life: str) -> None:
    points, killed = told[life]["points"], told[life]["killed"]
    assert killed
    for number, run in killed.items():
        where = f"killed {points[int(number) - 1]}, point {number} of {points}"
        assert run["killed"], where
        for job, expected in zip(run["jobs"], told[life]["undisturbed"]["jobs"], strict=True):
            for what in AT_MOST_ONCE:
                assert not Counter(job.pop(what)) - Counter(expected[what]), where
            assert job == {name: expected[name] for name in job}, where
            assert not job["alive"]


def test_every_transition_is_among_the_points(told: dict[str, Any]) -> None:
    made = set()
    for job in (job for life in told.values() for job in life["undisturbed"]["jobs"]):
        first, *reasons = (event.split()[-1] for event in job["events"] if event.startswith("state "))
        assert first == Reason.SUBMITTED
        state = JobState.QUEUED
        for reason in reasons:
            made.add((state, Reason(reason)))
            state = next_state(state, Reason(reason))
    assert made == {(state, reason) for state, reasons in TRANSITIONS.items() for reason in reasons}
