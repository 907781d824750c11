"""Every job of tests/service/bad_jobs is refused: with its field, for people, and without a trace."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.bad_jobs import GOOD, BadJob, bad_jobs
from tests.service.conftest import RunningApi

BAD_JOBS = bad_jobs()

LONGEST_MESSAGE = 5000  # a path takes 4096

# How Python, pydantic and the system speak among themselves.
NOT_FOR_PEOPLE = re.compile(
    r"Input should|Field required|Extra inputs|type=|pydantic|[Vv]alidation error"
    r"|valid (integer|string|number|dict|tuple|bool)"
    r"|\b(str|int|float|bool|dict|tuple|NoneType|None|True|False|Tuple|Dictionary|codec)\b"
    r"|\w+(Error|Config|Spec|Exception)\b|<class|Errno|Traceback|0x|\bsys\."
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "nothing").mkdir()
    tokenizer = {"model": {"vocab": {f"t{number}": number for number in range(300)}}}
    index = {
        "dtype": "uint16", "vocabulary": 302, "end_of_document": 301, "source": "0", "complete": True,
        "shards": [{"part": part, "name": f"{part}-00000.bin", "tokens": 5000} for part in ("training", "validation")],
    }  # fmt: skip
    few = [{"part": "training", "name": "training-00000.bin", "tokens": 10}]
    files = {
        "long.txt": "0123456789" * 10_000,
        "short.txt": "too short",
        "empty.txt": "",
        "tokenizer.json": tokenizer | {"added_tokens": [{"id": 301, "content": "</s>"}]},
        "without-vocabulary.json": {"model": {}},
        "list.json": [],
        "no-tokens.json": {"model": {"vocab": {}}},
        "words-for-ids.json": {"model": {"vocab": {"a": "first"}}},
        "tokens/index.json": index,
        "incomplete/index.json": index | {"complete": False},
        "damaged/index.json": '{"dtype": "uint16", "vocab',
        "no-index/index.json": {"dtype": "float8"},
        "few-tokens/index.json": index | {"shards": few},
        "all-training/index.json": index | {"shards": [few[0] | {"tokens": 5000}]},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def http(looked_at: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=looked_at.url, timeout=30) as opened:
        yield opened


def test_there_are_many_and_none_twice() -> None:
    assert len(BAD_JOBS) >= 200
    for what in ("case", "body"):
        counts = Counter((getattr(bad, what), bad.content_type) for bad in BAD_JOBS)
        assert [twice for twice, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("bad", BAD_JOBS, ids=[f"{bad.section}: {bad.case}" for bad in BAD_JOBS])
def test_it_is_refused(http: httpx.Client, texts: Path, bad: BadJob) -> None:
    before, body = http.get("/v1/jobs").json(), bad.body_in(texts)
    answer = http.post("/v1/jobs", content=body, headers={"Content-Type": bad.content_type})
    assert answer.status_code == bad.status, answer.text[:1000]
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    errors = problem.get("errors", [])
    assert {error["field"] for error in errors} == bad.fields, problem
    messages = [error["message"] for error in errors] or [problem["detail"]]
    assert any(bad.says in message for message in messages), messages
    for message in messages:
        assert len(message) <= LONGEST_MESSAGE
        assert not NOT_FOR_PEOPLE.search(message), message
    assert bad.hides is None or bad.hides not in answer.text
    assert http.get("/v1/jobs").json() == before


def test_of_thousands_of_faults_the_first_are_told(http: httpx.Client) -> None:
    job = GOOD | {f"field-{number}": 1 for number in range(5000)}
    problem = http.post("/v1/jobs", json=job).json()
    assert [error["field"] for error in problem["errors"]] == [f"field-{number}" for number in range(50)]
    assert problem["detail"].endswith("and 4950 more (fix these first)")


def test_the_job_that_they_change_is_accepted(api: RunningApi, texts: Path) -> None:
    body = json.dumps(GOOD).replace("FOLDER", str(texts))
    answer = httpx.post(f"{api.url}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 201, answer.text
