"""The URLs that are served, all through fsspec: paths, ``file://``, ``s3://`` and, for sources, ``hf://``."""

import glob
import re
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
from pydantic_core import PydanticCustomError

import boost_core.config.parsing.disk  # noqa: F401  # registers itself with fsspec

SCHEMES = ("file", "s3")
SOURCE_SCHEMES = (*SCHEMES, "hf")  # read-only data may also be on Hugging Face's hub
UNSHOWN = "unshown_value"  # type of errors about values that must not be shown

# For s3:// by s3fs's names (key, secret, token, endpoint_url, client_kwargs); for a disk ``beneath``, see ``Disk``.
StorageOptions = Mapping[str, Any]

# Timeouts in seconds and attempts for look-ups that a user waits for. Training and saving use longer ones.
_BRIEF = {"connect_timeout": 3, "read_timeout": 10}
_BRIEF_CALLS = {"call_seconds": 15.0, "attempts": 1}

_CREDENTIALS = "it may hold credentials, which belong in a named secret: remove them and set the job's credentials"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_SINGLE_COLON = re.compile(r"(file|local|s3|s3a|data):")
_QUERY = re.compile(r"\?[\w-]+=")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def refuse_unserved(url: str, schemes: Sequence[str] = SCHEMES) -> str:
    """Return ``url`` if its form is served. Plain paths are local.

    Args:
        url: The URL, or a plain path.
        schemes: The schemes that are served here.

    Raises:
        ValueError: It is not served. Neither the message nor the error as shown repeats the URL, since people put
            passwords into URLs.
    """
    if problem := _problem(url, schemes):
        raise PydanticCustomError(UNSHOWN, "{problem}", {"problem": problem})
    return url


def _problem(url: str, schemes: Sequence[str]) -> str | None:
    scheme, separator, rest = url.partition("://")
    if "::" in url:
        return f"'::' chains file systems, which is not supported; use {_named(schemes)}"
    if _CONTROL.search(url):
        return "contains a control character; check the path"
    if not separator:
        wrong = _SINGLE_COLON.match(url)
        return f"{wrong.group()} is followed by //, as in file:///folder or s3://bucket/folder" if wrong else None
    if scheme not in schemes:
        named = f"the scheme {scheme!r}" if _SCHEME.fullmatch(scheme) else "no valid scheme"
        return f"has {named}; use {_named(schemes)}"
    return {"s3": _problem_on_s3, "hf": _problem_on_the_hub}.get(scheme, _no_problem)(rest)


def _named(schemes: Sequence[str]) -> str:
    *others, last = (f"{scheme}://" for scheme in schemes)
    return f"a local path, {', '.join(others)} or {last}"


def _no_problem(_rest: str) -> None:
    return None


def _problem_on_the_hub(rest: str) -> str | None:
    kind, *names = rest.split("/")
    if kind != "datasets" or len(names) < 2 or not all(names[:2]):
        return "is not in a dataset on the hub; give a path such as hf://datasets/organization/name/folder/*.parquet"
    return f"has a query after '?'; {_CREDENTIALS}" if _QUERY.search(rest) else None


def _problem_on_s3(rest: str) -> str | None:
    bucket = rest.partition("/")[0]
    if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
        return f"the part before the first / is not a bucket name; {_CREDENTIALS}"
    return f"has a query after '?'; {_CREDENTIALS}" if _QUERY.search(rest) else None


def may_hold_credentials(text: str) -> bool:
    """Whether a text looks like a URL with a user, password or query, and should not be shown."""
    return any(sign in text.partition("://")[2] for sign in "@:?")


def is_local(url: str) -> bool:
    """Whether a URL is on a disk."""
    return "://" not in url.removeprefix("file://")


def options_at(url: str, storage_options: StorageOptions | None) -> dict[str, Any]:
    """Options to pass to fsspec along with a URL.

    Args:
        url: The URL, or a plain path.
        storage_options: Options for ``s3://`` and for disks; default: the process's own.
    """
    given = dict(storage_options or {})
    beneath = {"beneath": given.pop("beneath")} if "beneath" in given else {}
    if is_local(url):
        given = beneath
    elif not url.startswith("s3://"):
        given = {}
    # Other processes write to the same places, so a cached listing could be stale.
    return {"use_listings_cache": False, **given}


def literal(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    """A path as ``rm`` of a file system takes it: stores' clients expand wildcards, so that others' files would go."""
    return path if "file" in filesystem.protocol else glob.escape(path)


def giving_up_soon(storage_options: StorageOptions | None) -> StorageOptions:
    """Add short timeouts to storage options, for look-ups that a user waits for.

    Args:
        storage_options: Options for ``s3://``; default: the process's own.
    """
    of_the_node = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})  # such as the addressing style
    return {**(storage_options or {}), **_BRIEF_CALLS, "config_kwargs": {**_BRIEF, **of_the_node}}


for _protocol in ("s3", "s3a"):  # by name, because importing it takes a while
    fsspec.register_implementation(_protocol, "boost_core.config.parsing.s3.ObjectStore", clobber=True)
