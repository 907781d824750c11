"""No error about a job repeats what may be a secret."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from boost_core.config import JobSpec, load_job
from boost_core.config.base import in_lines, refuse_unserved
from service.cli.main import app
from service.models.problems import job_errors
from tests.unit.test_job_spec import changed

SECRET = "wJalrXUtnFEMI7MDENGbPxRfiCYEXAMPLEKEY"

REFUSED = [
    (changed(checkpoint={"url": f"s3://AKIA:{SECRET}@bucket/runs"}), "checkpoint.url", "is not a bucket name"),
    (changed(checkpoint={"url": f"s3://{SECRET}@bucket/runs"}), "checkpoint.url", "is not a bucket name"),
    (changed(checkpoint={"url": f"s3://AKIA:ab/{SECRET}@bucket/runs"}), "checkpoint.url", "is not a bucket name"),
    (changed(checkpoint={"weights_from": f"s3://bucket/a?k=b&secret={SECRET}"}), "checkpoint.weights_from", "a query"),
    (changed(checkpoint={"url": f"https://me:{SECRET}@host/runs"}), "checkpoint.url", "has the scheme 'https'"),
    (changed(checkpoint={"url": f"{SECRET}@s3://bucket"}), "checkpoint.url", "no valid scheme"),
    (changed(checkpoint={"url": f"filecache::s3://{SECRET}@bucket"}), "checkpoint.url", "chains file systems"),
    (changed(checkpoint={"url": f"file:/{SECRET}"}), "checkpoint.url", "file: is followed by //"),
    (changed(data={"tokenizer": f"s3://AKIA:{SECRET}@bucket/a.json"}), "data.tokenizer", "is not a bucket name"),
    (
        changed(data={"source": {"kind": "text", "paths": ["/a", f"s3://AKIA:{SECRET}@bucket/a"]}}),
        "data.source.paths", "set the job's credentials",
    ),
    (
        changed(data={"mixture": [{"kind": "text", "weight": 1, "paths": [f"s3://{SECRET}@bucket/a"]}]}),
        "data.mixture[0].paths", "set the job's credentials",
    ),
    (changed(credentials=SECRET), "credentials", "should match pattern"),
    (changed(credentials={"key": SECRET}), "credentials", "must be a string"),
    (changed(aws_secret_access_key=SECRET), "aws_secret_access_key", "there is no such field"),
    (changed(checkpoint={"secret": SECRET}), "checkpoint.secret", "there is no such field"),
    (changed(name=f"s3://AKIA:{SECRET}@bucket"), "name", "should match pattern"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("job", "field", "message"), REFUSED, ids=[f"{field} {word}" for _, field, word in REFUSED])
def test_a_refusal_names_the_field_and_not_the_value(job: dict, field: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(job)
    (problem,) = job_errors(caught.value.errors())
    assert (problem.field, problem.value) == (field, None)
    assert message in problem.message
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    with pytest.raises(ValidationError) as loading:
        load_job(path)
    shown = CliRunner().invoke(app, ["submit", str(path)])
    assert (shown.exit_code, field in shown.output) == (2, True)
    texts = (problem.model_dump_json(), str(caught.value), str(loading.value), in_lines(caught.value), shown.output)
    assert not [text for text in texts if SECRET in text]


@pytest.mark.parametrize(
    "url",
    [
        "corpus/*.txt", "/data/a@b/part-?.txt", "~/a:b", "file:///data/a b", "s3://bucket", "s3://bucket/you@here/a:b",
        "s3://bucket/day=1/part-?.jsonl", "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/runs",
    ],
)  # fmt: skip
def test_what_is_served(url: str) -> None:
    assert refuse_unserved(url) == url


def test_a_number_of_more_digits_than_python_writes_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"  # where a hexadecimal number may be as long as the file
    file.write_text(json.dumps(changed()).replace('"steps":', f'"seed": 0x{"f" * 5000}, "steps":'))
    with pytest.raises(ValidationError) as refused:
        load_job(file)
    (fault,) = job_errors(refused.value.errors(), JobSpec)
    assert (fault.field, fault.value) == ("training.seed", None)
    assert fault.message.endswith("not an integer of 20000 bits")
