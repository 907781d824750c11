"""The service is killed (SIGKILL) at each transition; neither is a job lost nor does anything happen twice.

On SQLite it is killed at every point of every life, on PostgreSQL once wherever one kind of point comes after another:
what follows from a state is the same there, and only its transactions are others.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from service.jobs.database import migrate
from service.jobs.states import TRANSITIONS, JobState, Reason, next_state
from tests.service.crash_matrix import LIVES

pytestmark = pytest.mark.timeout(1200)  # two minutes where nothing else runs

AT_MOST_ONCE = ("launches", "drills")  # what may not have happened yet when its user changed their mind


ALL = tuple(LIVES)
SOME = ("succeeds", "is paused as it starts")  # on SQLite, for every run
# In which everything is done that is done in any.
EVERYTHING = (
    "is lost for good", "is retried", "is paused at once", "is cancelled as it starts", "is changed",
    "is paused as it starts", "is lost as it starts", "makes room",
)  # fmt: skip
PLAYED = {"sqlite": ALL, "postgresql": EVERYTHING}


Told = dict[str, Any]


@pytest.fixture(scope="module")
def told_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Told]:
    """What became of the lives on a database: of all if any test of this file is run that is marked full, else of some.

    They are lived once.
    """
    is_full = any(item.path == request.path and item.get_closest_marker("full") for item in request.session.items)

    @cache
    def told(database: str) -> Told:
        folder, lives = tmp_path_factory.mktemp("lives"), PLAYED[database] if is_full else SOME
        is_sqlite = database == "sqlite"
        url = f"sqlite:///{folder}/boost.db" if is_sqlite else request.getfixturevalue("postgres").create_database()
        migrate(url)
        command = [sys.executable, "-m", "tests.service.crash_matrix", url, str(folder), *lives]
        done = subprocess.run(command, capture_output=True, text=True)
        log = (folder / "log").read_text()
        assert (done.returncode, log) == (0, ""), done.stderr + log
        return json.loads((folder / "told.json").read_text())

    return told


@pytest.mark.full
@pytest.mark.parametrize(
    ("database", "life"),
    [
        pytest.param(database, life, marks=() if (database, life) in product(["sqlite"], SOME) else pytest.mark.nightly)
        for database, lives in PLAYED.items()
        for life in lives
    ],
)
def test_killed_at_each_point_all_goes_on_as_if_undisturbed(
    told_of: Callable[[str], Told], database: str, life: str
) -> None:
    told = told_of(database)
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


@pytest.mark.nightly
def test_every_transition_is_among_the_points(told_of: Callable[[str], Told]) -> None:
    told = told_of("sqlite")
    done, of_all = ({point for life in lives for point in told[life]["points"]} for lives in (EVERYTHING, ALL))
    assert done == of_all
    made = set()
    for job in (job for life in told.values() for job in life["undisturbed"]["jobs"]):
        first, *reasons = (event.split()[-1] for event in job["events"] if event.startswith("state "))
        assert first == Reason.SUBMITTED
        state = JobState.QUEUED
        for reason in reasons:
            made.add((state, Reason(reason)))
            state = next_state(state, Reason(reason))
    # Gangs in a file pause at once, so no pause is withdrawn too late, and none of theirs waits for workers.
    unplayed = {(JobState.RUNNING, Reason.RESUMED_BY_USER), (JobState.RUNNING, Reason.WAITING_FOR_RESOURCES)}
    assert made == {(state, reason) for reason, changes in TRANSITIONS.items() for state in changes} - unplayed
