"""Jobs that the service has to refuse, and what it has to say: a list of cases in each of the YAML files here.

A case changes a good job (``set`` and ``drop`` name fields by their path), or is another JSON value (``job``) or text
that need be no JSON (``text``). The answer has to name exactly the ``field`` (or fields) at fault, with a message that
``says`` what to do about it and ``hides`` what is not to be shown. FOLDER is replaced with a folder of texts.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GOOD = {
    "name": "tiny",
    "model": {"preset": "tiny"},
    "training": {"steps": 10, "sequence_length": 64},
    "data": {"source": {"kind": "text", "paths": ["FOLDER/long.txt"]}},
}


@dataclass(frozen=True)
class BadJob:
    case: str
    section: str
    body: bytes
    fields: frozenset[str]
    says: str
    hides: str | None
    status: int
    content_type: str

    def body_in(self, folder: Path) -> bytes:
        return self.body.replace(b"FOLDER", str(folder).encode())


def bad_jobs() -> list[BadJob]:
    return [
        _bad_job(path.stem, **case)
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
        for case in yaml.load(path.read_text(encoding="utf-8"), _Loader)
    ]


def _bad_job(
    section: str,
    case: str,
    says: str,
    field: str | list[str] = (),
    hides: str | None = None,
    status: int = 422,
    content_type: str = "application/json",
    **what: Any,
) -> BadJob:
    fields = frozenset([field] if isinstance(field, str) else field)
    return BadJob(case, section, _body(**what), fields, says, hides, status, content_type)


def _body(**what: Any) -> bytes:
    if "text" in what:
        text = what.pop("text")
        body = text if isinstance(text, bytes) else text.encode()
    elif "job" in what:
        body = json.dumps(what.pop("job")).encode()
    else:
        body = json.dumps(_changed(what.pop("set", {}), what.pop("drop", None))).encode()
    assert not what, f"a case has no {', '.join(what)}"
    return body


def _changed(changes: dict[str, Any], dropped: str | None) -> dict[str, Any]:
    job = copy.deepcopy(GOOD)
    for path, value in changes.items():
        section, name = _section(job, path)
        section[name] = value
    if dropped:
        section, name = _section(job, dropped)
        del section[name]
    return job


def _section(job: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *sections, name = path.split(".")
    for section in sections:
        job = job.setdefault(section, {})
    return job, name


class _Loader(yaml.SafeLoader):
    """YAML with ``!repeat [text, times]``, ``!join [texts]`` and ``!hex "bytes"``."""


def _repeat(loader: _Loader, node: yaml.SequenceNode) -> str:
    text, times = loader.construct_sequence(node)
    return text * times


def _join(loader: _Loader, node: yaml.SequenceNode) -> str:
    return "".join(loader.construct_sequence(node))


def _hex(loader: _Loader, node: yaml.ScalarNode) -> bytes:
    return bytes.fromhex(loader.construct_scalar(node))


_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!join", _join)
_Loader.add_constructor("!hex", _hex)
