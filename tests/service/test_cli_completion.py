"""Shell completion of job ids."""

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from service.cli.main import app
from tests.service.canned import a_job
from tests.service.scripted import Answer, problem, serving

JOBS = Answer(
    200,
    {"jobs": [a_job(id="job-2a", name="new"), a_job(id="job-1b", name="old")], "next_cursor": None},
)


def offered(words: str, **environment: str) -> Sequence[str]:
    """What bash is offered after ``boost`` and these words."""
    line = f"boost {words}"
    result = CliRunner().invoke(
        app,
        prog_name="boost",
        env={
            "_BOOST_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1),
            "BOOST_CONFIG": "/nowhere/login.json",
        }
        | environment,
    )  # fmt: skip
    assert "Traceback" not in result.output
    return result.stdout.split()


@pytest.mark.full
@pytest.mark.parametrize("command", ["show", "events", "logs", "cancel", "pause", "watch job-2a", "ckpt ls", "clone"])
def test_ids_are_offered(command: str) -> None:
    with serving({"GET /v1/jobs": JOBS}) as server:
        assert offered(f"{command} job-", BOOST_URL=server.url) == ["job-2a", "job-1b"]
        assert offered(f"{command} job-1", BOOST_URL=server.url) == ["job-1b"]
        assert offered(f"{command} run", BOOST_URL=server.url) == []


def test_the_service_named_on_the_line_is_asked() -> None:
    with serving({"GET /v1/jobs": JOBS}) as server:
        assert offered(f"show --url {server.url} job-2", BOOST_URL="http://127.0.0.1:1") == ["job-2a"]


def test_no_service_and_no_permission_offer_nothing_and_say_nothing(unused_url: str) -> None:
    assert offered("show job-", BOOST_URL=unused_url) == []
    assert offered("show job-", BOOST_URL="nonsense") == []
    assert offered("show job-", BOOST_PORT="nonsense") == []
    with serving({"GET /v1/jobs": problem(401, "unauthenticated")}) as server:
        assert offered("show job-", BOOST_URL=server.url) == []
    with serving({"GET /v1/jobs": problem(503, "not-ready", Retry_After="0")}) as server:
        assert offered("show job-", BOOST_URL=server.url) == []
    assert len(server.asked) == 1


def test_commands_are_offered() -> None:
    assert offered("wa") == ["watch"]
