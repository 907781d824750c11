"""Named secrets: read from files, told to nobody."""

import html
import io
import json
import logging
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from boost_core.messages import Fault, FaultReport, LogLine
from service.gang.assignment import End, Message, RankEnd
from service.gang.worker.rank_metrics import LogReports, SupervisorReporter
from service.gang.worker.worker import end_of
from service.security.redaction import redact, redact_logs, register_secrets
from service.security.secrets import SecretReference, SecretUnusable, load

FILES = {
    "access_key_id": "AKIA-of-unit-tests",
    "secret_access_key": "wJal/rXUtn+FEMI=K7&MDENG\\bPx'Rf",
    "session_token": "FwoGZXIvYXdzEBYaD<token>",
    "endpoint_url": "http://store.example:9000",
    "region": "eu-1",
}
CONFIDENTIAL = [FILES[name] for name in ("access_key_id", "secret_access_key", "session_token")]


def write(folder: Path, **changes: str | bytes | None) -> SecretReference:
    """Files as the operator keeps them: a line each; ``None`` leaves one out."""
    where = folder / "blue" / "prod-s3"
    where.mkdir(parents=True)
    for name, content in (FILES | changes).items():
        if content is not None:
            (where / name).write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return SecretReference(str(folder), "blue", "prod-s3")


def test_a_secret_becomes_s3fs_options(tmp_path: Path) -> None:
    secret = load(write(tmp_path))
    assert secret.storage_options() == {
        "anon": False,
        "key": FILES["access_key_id"],
        "secret": FILES["secret_access_key"],
        "token": FILES["session_token"],
        "endpoint_url": FILES["endpoint_url"],
        "client_kwargs": {"region_name": FILES["region"]},
    }  # fmt: skip


def test_what_may_be_left_out(tmp_path: Path) -> None:
    secret = load(write(tmp_path, session_token=None, endpoint_url=None, region=None))
    assert secret.storage_options() == {"anon": False, "key": CONFIDENTIAL[0], "secret": CONFIDENTIAL[1], "token": None}


def test_files_as_kubernetes_mounts_them(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere")
    mounted = tmp_path / "blue" / "prod-s3"
    mounted.mkdir(parents=True)
    (mounted / "..data").symlink_to(tmp_path / "elsewhere" / "blue" / "prod-s3")
    for name in FILES:
        (mounted / name).symlink_to(Path("..data") / name)
    assert asdict(load(SecretReference(str(tmp_path), "blue", "prod-s3"))) == FILES


BAD = [
    ({"access_key_id": None}, "the secret 'prod-s3' of tenant 'blue' has no file access_key_id"),
    ({"secret_access_key": None}, "has no file secret_access_key"),
    ({"secret_access_key": ""}, "secret_access_key of the secret 'prod-s3' of tenant 'blue' is too short"),
    ({"session_token": "abc"}, "session_token .* is too short"),
    ({"region": " "}, "region .* is too short"),
    ({"secret_access_key": "two-words here"}, "holds more than one word"),
    ({"secret_access_key": "two-words\nhere"}, "holds more than one word"),
    ({"secret_access_key": b"two-words\xff"}, "holds more than ASCII text"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_secret_is_refused_by_its_file_and_without_its_content(
    tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(SecretUnusable, match=message) as caught:
        load(write(tmp_path, **changes))
    assert "ask the operator of the service" in str(caught.value)
    assert not [text for text in ("two-words", str(tmp_path), *CONFIDENTIAL) if text in str(caught.value)]
    assert caught.value.__cause__ is None  # and no traceback shows what was read:
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    reference = write(tmp_path, secret_access_key=None)
    (tmp_path / "blue" / "prod-s3" / "secret_access_key").mkdir()
    with pytest.raises(SecretUnusable, match=r"secret_access_key of .* cannot be read: Is a directory"):
        load(reference)


@pytest.mark.parametrize(("tenant", "name"), [("red", "prod-s3"), ("blue", "prod"), ("prod-s3", "blue")])
def test_a_secret_that_is_not_there(tmp_path: Path, tenant: str, name: str) -> None:
    write(tmp_path)
    with pytest.raises(SecretUnusable, match=f"tenant '{tenant}' has no secret of that name; correct"):
        load(SecretReference(str(tmp_path), tenant, name))


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "a/b", "../red/prod-s3", "A", "-a", "a\n", "a" * 64, "ä"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    for tenant, secret in ((name, "prod-s3"), ("blue", name)):
        with pytest.raises(SecretUnusable, match="is not of the form"):
            SecretReference(str(tmp_path), tenant, secret)


def test_a_secret_shows_in_no_text_and_leaves_no_process(tmp_path: Path) -> None:
    secret = load(write(tmp_path))
    assert repr(secret) == f"Secret(endpoint_url='{FILES['endpoint_url']}', region='eu-1')"
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(secret)


WRITINGS: list[Callable[[str], str]] = [
    str, quote, quote_plus, lambda value: quote(value, safe=""),
    lambda value: re.sub("%..", lambda escape: escape.group().lower(), quote(value, safe="")),
    json.dumps, repr, html.escape, lambda value: f"s3://{value}@bucket", lambda value: f"'{value}'", str.encode,
]  # fmt: skip


@pytest.mark.parametrize("write_out", WRITINGS)
def test_loaded_values_are_taken_out_however_they_are_written(tmp_path: Path, write_out: Callable) -> None:
    load(write(tmp_path))
    written = str(write_out(CONFIDENTIAL[1]))
    text = redact(f"before {written} and {CONFIDENTIAL[0]}{CONFIDENTIAL[2]} after")
    assert text.startswith("before ") and text.endswith("[redacted][redacted] after")
    assert text.count("[redacted]") == 3
    assert not any(part in text for part in ("wJal", "FEMI", "MDENG", "Px", "AKIA", "token"))
    assert redact("nothing of it, eu-1 at store.example") == "nothing of it, eu-1 at store.example"


def test_of_two_values_the_longer_one_goes_as_a_whole() -> None:
    register_secrets(["ovrlp-abc"])
    register_secrets(["ovrlp-abcdef", "ovrlp"])
    assert redact("ovrlp-abcdef ovrlp-abc ovrlp-a") == "[redacted] [redacted] [redacted]-a"


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = logging.getLogRecordFactory()
    redact_logs()
    yield
    logging.setLogRecordFactory(before)


class Heard:
    """Where a rank's log lines go."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def report(self, line: LogLine) -> None:
        self.lines.append(line)


def test_neither_log_lines_nor_tracebacks_nor_ends_show_a_secret(tmp_path: Path, logs: None) -> None:
    load(write(tmp_path))
    heard, stream = Heard(), io.StringIO()
    logger = logging.getLogger("tests.secrets")
    handlers = [LogReports(heard, 1), logging.StreamHandler(stream)]
    for handler in handlers:
        logger.addHandler(handler)
    try:
        try:
            raise PermissionError(f"{CONFIDENTIAL[1]} is not known") from ValueError(quote_plus(CONFIDENTIAL[1]))
        except PermissionError as error:
            logger.exception("rank %d cannot use %s", 1, CONFIDENTIAL[0])
            end = end_of(error)
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
    assert end == RankEnd(End.FAILED, "PermissionError: [redacted] is not known")
    (line,) = heard.lines
    for text in (line.message, stream.getvalue()):
        assert text.startswith("rank 1 cannot use [redacted]\nValueError: [redacted]\n")
        assert "PermissionError: [redacted] is not known" in text
        assert not [value for value in CONFIDENTIAL if value in text or quote_plus(value) in text]


def test_what_a_store_says_is_reported_without_secrets(tmp_path: Path) -> None:
    load(write(tmp_path))
    messages: list[Message] = []
    reporter = SupervisorReporter(messages.append, 0)
    reporter.report(FaultReport(what=Fault.STORE, step=3, message=f"{CONFIDENTIAL[1]} is not known"))
    reporter.flush(60)
    (said,) = (report for message in messages for _, report in message.reports)
    assert said == FaultReport(what=Fault.STORE, step=3, message="[redacted] is not known")


def test_a_faulty_log_call_fails_as_it_does_without_us(tmp_path: Path, logs: None) -> None:
    load(write(tmp_path))
    logger, stream = logging.getLogger("tests.secrets"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.handleError = lambda record: stream.write("refused")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.warning("%d", "no number")
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    assert stream.getvalue() == "refused"
