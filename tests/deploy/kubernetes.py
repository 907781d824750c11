"""Plays Kubernetes' API for what Helm looks up while it renders: Secrets and Ray clusters that are there already."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.deploy.chart import NAMESPACE, Object

_SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
_PATHS = {"Secret": _SECRETS, "RayCluster": f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"}
_MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def _resources(version: str, *kinds: str) -> Object:
    resources = [
        {"name": f"{kind.lower()}s", "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": []}
        for kind in kinds
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


_RAY: Object = {"groupVersion": "ray.io/v1", "version": "v1"}
_PATCH = {
    "x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Secret"},
    "parameters": [{"name": "fieldValidation", "in": "query"}],
}
_ANSWERS: dict[str, Any] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "ray.io", "versions": [_RAY], "preferredVersion": _RAY}],
    },
    "/api/v1": _resources("v1", "Secret"),
    "/openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
    "/openapi/v3/api/v1": {
        "openapi": "3.0.0",
        "paths": {f"{_SECRETS}/{{name}}": {"patch": _PATCH}},
        "components": {"schemas": {}},
    },
}


@contextmanager
def kubernetes(*objects: Object, ray: Sequence[str] = ("RayCluster", "RayCronJob")) -> Iterator[str]:
    """Answer as a cluster in which these objects are, and in which KubeRay serves these kinds; its URL."""
    known = _ANSWERS | {"/apis/ray.io/v1": _resources("ray.io/v1", *ray)}
    known |= {f"{_PATHS[each['kind']]}/{each['metadata']['name']}": each for each in objects}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = known.get(self.path.partition("?")[0])
            body = json.dumps(answer or _MISSING).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
