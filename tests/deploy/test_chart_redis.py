"""What Ray's head knows of the cluster, kept in a Redis: what KubeRay is told, and what would not work."""

import re

import pytest
from helm_python import HelmRenderError

from tests.deploy.chart import NAME, Values, nested, of_kind, render, the, values
from tests.deploy.manifests import check
from tests.deploy.test_chart_autoscaled import installed, upgraded
from tests.deploy.test_chart_templates import OPEN, POSTGRES

REDIS = nested("ray.gcsFaultTolerance", {"redisAddress": "rediss://redis.ml:6379", "existingSecret": "redis"})
OUTSIDE: Values = {"ray": {"enabled": False, "address": "ray:6379", "token": {"existingSecret": "token"}}}


def test_kuberay_is_told_the_redis() -> None:
    cluster = the(render(REDIS), "RayCluster")
    check(cluster)
    password = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    options = {"redisAddress": "rediss://redis.ml:6379", "redisPassword": password}
    assert cluster["spec"]["gcsFaultToleranceOptions"] == options
    more = values(REDIS, ray__gcsFaultTolerance={"usernameKey": "user", "externalStorageNamespace": "ml-2"})
    cluster = the(render(more), "RayCluster")
    check(cluster)
    user = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "user"}}}
    named = {"redisUsername": user, "externalStorageNamespace": "ml-2"}
    assert cluster["spec"]["gcsFaultToleranceOptions"] == options | named
    assert "gcsFaultToleranceOptions" not in the(render(), "RayCluster")["spec"]


@pytest.mark.parametrize(("given", "kept"), [(POSTGRES, set()), (REDIS, {f"{NAME}-ray-token", f"{NAME}-head"})])
def test_what_empties_redis_after_an_uninstallation_is_still_there(given: Values, kept: set[str]) -> None:
    objects = render(values(POSTGRES, given, serviceAccounts__head__annotations={"role": "arn"}))
    found = {
        each["metadata"]["name"]
        for each in objects
        if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        and each["kind"] != "PersistentVolumeClaim"
    }
    assert found == kept
    (account,) = of_kind(objects, "ServiceAccount", f"{NAME}-head")
    assert account["metadata"]["annotations"]["role"] == "arn"


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "said", "right"),
    [
        (nested("ray.gcsFaultTolerance.redisAddress", "r:6379"), "would have no password", REDIS),
        (nested("ray.gcsFaultTolerance.existingSecret", "redis"), "is the password of no Redis", REDIS),
        (values(OUTSIDE, REDIS, OPEN), "is not this chart's", nested("ray", {"enabled": True, "address": ""})),
        (nested("env.REDIS_USERNAME", "boost"), "set ray.gcsFaultTolerance instead", None),
        (
            values(REDIS, networkPolicy__egress__enabled=True),
            "ray.gcsFaultTolerance.redisAddress needs more",
            nested("networkPolicy.egress.allow", [{"to": [{"podSelector": {"matchLabels": {"app": "redis"}}}]}]),
        ),
    ],
)
def test_a_redis_that_would_not_do_is_refused(wrong: Values, said: str, right: Values | None) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(wrong)
    if right:
        render(values(wrong, right))


@pytest.mark.full
def test_another_ray_does_not_read_what_this_one_has_kept() -> None:
    live = installed(REDIS)
    newer = values(REDIS, ray__version="9.9.9")
    with pytest.raises(HelmRenderError, match=r"changes from .* to 9\.9\.9, .*set ray\.gcsFaultTolerance\.external"):
        upgraded(live, newer)
    apart = values(newer, ray__gcsFaultTolerance__externalStorageNamespace="ray-9.9.9")
    assert upgraded(live, apart)["gcsFaultToleranceOptions"]["externalStorageNamespace"] == "ray-9.9.9"
    live["spec"] |= upgraded(live, apart)
    assert upgraded(live, apart) == live["spec"]
