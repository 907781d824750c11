"""The token of the Ray cluster is made once: an upgrade finds it in the cluster and leaves it as it is.

Helm looks it up, so here it speaks to a server that answers as Kubernetes' API does about Secrets, and nothing else.
"""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import helm_python
import yaml

from tests.deploy.chart import CHART, NAME, NAMESPACE, RELEASE, Object

SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}-ray-token"
TOKEN = base64.b64encode(b"the one of before").decode()
KIND = {"group": "", "version": "v1", "kind": "Secret"}
PATCH = {"x-kubernetes-group-version-kind": KIND, "parameters": [{"name": "fieldValidation", "in": "query"}]}
ANSWERS = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": []}],
    },
    "/openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
    "/openapi/v3/api/v1": {"openapi": "3.0.0", "paths": {SECRET: {"patch": PATCH}}, "components": {"schemas": {}}},
}
MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def the_secret(key: str) -> Object:
    owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    metadata = {"name": f"{NAME}-ray-token", "namespace": NAMESPACE, "annotations": owner, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {key: TOKEN}}


@contextmanager
def kubernetes(secret: Object | None = None) -> Iterator[str]:
    known = ANSWERS | {SECRET: secret}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = known.get(self.path.partition("?")[0])
            body = json.dumps(answer or MISSING).encode()
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


def token(url: str, folder: Path) -> str:
    """What Helm would install, of a chart that holds the token's template alone."""
    chart = folder / "boost"
    (chart / "templates").mkdir(parents=True, exist_ok=True)
    for name in ("Chart.yaml", "values.yaml", "values.schema.json", "templates/_helpers.tpl"):
        shutil.copy(CHART / name, chart / name)
    shutil.copy(CHART / "templates" / "ray" / "token.yaml", chart / "templates")
    with helm_python.Config(kube_apiserver=url, storage_driver="memory", namespace=NAMESPACE) as config:
        release = config.install(chart, RELEASE, namespace=NAMESPACE, dry_run="server")
    (value,) = yaml.safe_load(release["manifest"])["data"].values()
    return str(value)


def test_the_token_that_is_there_stays(tmp_path: Path) -> None:
    with kubernetes(the_secret("auth_token")) as url:
        assert token(url, tmp_path) == TOKEN


def test_a_token_is_made_where_there_is_none(tmp_path: Path) -> None:
    with kubernetes() as url:
        made = {token(url, tmp_path) for _ in range(2)}
    assert len(made) == 2
    assert {len(base64.b64decode(value)) for value in made} == {64}


def test_a_secret_that_holds_something_else_gets_one(tmp_path: Path) -> None:
    with kubernetes(the_secret("other")) as url:
        assert token(url, tmp_path) != TOKEN
