"""The token of the Ray cluster is made once: an upgrade finds it in the cluster and leaves it as it is.

Helm looks it up, so here it speaks to a server that answers as Kubernetes' API does about Secrets, and nothing else.
"""

import base64
import shutil
from pathlib import Path

import yaml

from tests.deploy.chart import CHART, NAME, NAMESPACE, RELEASE, Object, helm
from tests.deploy.kubernetes import kubernetes

TOKEN = base64.b64encode(b"the one of before").decode()


def the_secret(key: str) -> Object:
    owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    metadata = {"name": f"{NAME}-ray-token", "namespace": NAMESPACE, "annotations": owner, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {key: TOKEN}}


def token(url: str, folder: Path) -> str:
    """What Helm would install, of a chart that holds the token's template alone."""
    chart = folder / "boost"
    (chart / "templates").mkdir(parents=True, exist_ok=True)
    for name in ("Chart.yaml", "values.yaml", "values.schema.json", "templates/_helpers.tpl"):
        shutil.copy(CHART / name, chart / name)
    shutil.copy(CHART / "templates" / "ray" / "token.yaml", chart / "templates")
    with helm(url) as config:
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
