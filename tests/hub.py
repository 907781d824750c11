"""A hub on a local port that speaks as much of Hugging Face's protocol as an upload and a download take.

Small files come in the commit itself, large ones by git-LFS before it, addressed by their SHA-256:
https://huggingface.co/docs/hub/api and https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
COMMIT = "1" * 40


class LocalHub(ThreadingHTTPServer):
    """``files`` has what was committed, by repository and path; ``private`` the repositories that are not public."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What makes ``huggingface_hub`` use it, over LFS."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def _told(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _listed(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What is in a folder, or anywhere below it."""
    start = f"{folder}/" if folder else ""
    below = {name: content for name, content in files.items() if name.startswith(start)}
    listed = [_told(name, content) for name, content in below.items() if recursive or "/" not in name[len(start) :]]
    folders = {start + name[len(start) :].partition("/")[0] for name in below if "/" in name[len(start) :]}
    return listed + [{"type": "directory", "path": each, "oid": each} for each in sorted(folders)]


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and self.path != "/api/validate-yaml":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(content)
            repository = f"{asked['organization']}/{asked['name']}"
            there = repository in self.server.files
            self.server.files.setdefault(repository, {})
            self.server.private |= {repository} if asked["visibility"] == "private" else set()
            self._answer(409 if there else 200, {"url": f"{self.server.url}/{repository}", "name": repository})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/.+/preupload/main", self.path):
            modes = {False: "regular", True: "lfs"}
            paths = [file["path"] for file in json.loads(content)["files"]]
            files = [{"path": path, "uploadMode": modes[path.endswith(".safetensors")]} for path in paths]
            self._answer(200, {"files": [{"shouldIgnore": False, "oid": None} | file for file in files]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            places = [{"upload": {"href": f"{self.server.url}/objects/{each['oid']}"}} for each in objects]
            actions = [each | {"actions": place} for each, place in zip(objects, places, strict=True)]
            self._answer(200, {"transfer": "basic", "objects": actions})
        elif committed := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self._commit(committed.group(1), [json.loads(line) for line in content.splitlines()])
        else:
            self._answer(404, {"error": self.path})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.removeprefix("/objects/")
        whole = hashlib.sha256(content).hexdigest() == oid
        self.server.objects |= {oid: content} if whole else {}
        self._answer(200 if whole else 422, {})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/"):
            self._answer_dataset(path)
            return
        if told := re.fullmatch(r"/api/models/(.+)/(revision|tree)/[^/]+", path):
            files = self.server.files[told.group(1)]
            listed = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            about = {"id": told.group(1), "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._answer(200, about if told.group(2) == "revision" else listed)
            return
        asked = re.fullmatch(r"/(?:datasets/)?(.+?)/resolve/[^/]+/(.+)", self.path)
        content = self.server.files.get(asked.group(1), {}).get(asked.group(2)) if asked else None
        if content is None:
            self._answer(404, {"error": self.path}, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked_range := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = map(int, asked_range.groups())
            about["Content-Range"] = f"bytes {begin}-{min(end, len(content) - 1)}/{len(content)}"
            self._answer(206, content[begin : end + 1], **about)
            return
        self._answer(200, content, **about)

    def _answer_dataset(self, path: str) -> None:
        """What it has of a dataset: about it, or the files of a folder."""
        found = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(tree|revision)/[^/]+/?(.*))?", path)
        files = self.server.files.get(found.group(1)) if found else None
        if files is None:
            self._answer(404, {"error": path}, **{"X-Error-Code": "RepoNotFound"})
        elif found.group(2) == "tree":
            self._answer(200, _listed(files, found.group(3), "recursive=true" in self.path))
        else:
            self._answer(200, {"id": found.group(1), "sha": COMMIT, "siblings": []})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[repository][value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                self.server.files[repository][value["path"]] = self.server.objects[value["oid"]]
            if line["key"] == "deletedFile":
                del self.server.files[repository][value["path"]]
        self._answer(200, {"commitUrl": f"{self.server.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""
