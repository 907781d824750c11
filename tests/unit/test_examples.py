"""The examples of the OpenAPI document are legal, and every body that can be sent has one."""

from typing import Any

import pytest

from boost_core.config import JobSpec
from service.api.app import create_app
from service.api.examples import SPEC, examples_of_models
from service.jobs.database import migrate
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.settings import Settings


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    url = f"sqlite:///{home}/boost.db"
    migrate(url)
    return create_app(JobStore(url), Settings(home=home), Outlook).openapi()


@pytest.mark.full
@pytest.mark.parametrize("example", examples_of_models(), ids=lambda example: type(example).__name__)
def test_an_example_is_legal_and_in_the_document(example: Any, document: dict[str, Any]) -> None:
    plain = example.model_dump(mode="json")
    assert type(example).model_validate(plain) == example
    name = type(example).__name__
    schemas = document["components"]["schemas"]
    found = [schemas[each] for each in (name, f"{name}-Input", f"{name}-Output") if each in schemas]
    assert found
    assert all(schema["examples"] in ([plain], [SPEC]) for schema in found)


def test_the_short_example_is_a_legal_job() -> None:
    assert JobSpec.model_validate(SPEC).layouts()


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    lacking = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                if not document["components"]["schemas"].get(name, {}).get("examples"):
                    lacking.append(f"{method} {path}")
    assert lacking == []
