"""Each template by itself: what it makes of the values that it is about."""

import base64
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError

import boost_core
from tests.deploy.chart import (
    CHART,
    NAME,
    Object,
    Values,
    chart,
    environment,
    nested,
    of_kind,
    pod,
    pod_templates,
    read_values,
    render,
    the,
    values,
)
from tests.deploy.manifests import check
from tests.service.scripted import Answer, problem, serving

POSTGRES = nested("database.existingSecret", "boost-database")
OPEN = nested("networkPolicy.enabled", False)
GROUP: Values = {"name": "gpu", "minReplicas": 1, "maxReplicas": 2, "cpu": "8", "memory": "64Gi"}


def spec_of_cluster(*changes: Values, **paths: Any) -> Object:
    spec: Object = the(render(values(*changes, **paths)), "RayCluster")["spec"]
    return spec


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (nested("api.replicas", 2), "SQLite serves one replica; set database.existingSecret"),
        (nested("api.autoscaling.enabled", True), "SQLite serves one replica"),
        (nested("ray.enabled", False), "there is no Ray"),
        (nested("ray.address", "ray:6379"), "set one of the two"),
        ({"ray": {"enabled": False, "address": "ray:6379"}}, "set ray.token.existingSecret"),
        (nested("checkpoints.volume.enabled", False), "set config.checkpointRoot"),
        (nested("ingress.enabled", True), "needs ingress.host and ingress.tlsSecret"),
        (nested("ray.gangScheduling.by", "kueue"), "set ray.gangScheduling.queue"),
        (
            {"ray": {"gangScheduling": {"by": "kueue", "queue": "q"}, "autoscaler": {"enabled": True}}},
            "Kueue admits a Ray cluster of one size",
        ),
        (nested("monitoring.serviceMonitor.enabled", True), "Prometheus needs an API key"),
        (nested("image", {"tag": "0.3.0", "trainerTag": "0.2.0"}), "both images are of one version"),
        (nested("image", {"tag": "0.3.0", "trainerTag": "0.3.01"}), "both images are of one version"),
        *(
            (nested("image", {"tag": "0.3.0", "trainerTag": f"0.3.0-{end}"}), "both images are of one version")
            for end in ("rc1", "rc1-cpu", "alpha.2", "b1", "dev", "20260101", "")
        ),
        (nested("image.trainerTag", "9.0.0"), f"set it to {boost_core.__version__}"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong: Values, said: str) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(wrong)


def test_replicas() -> None:
    assert the(render(), "Deployment")["spec"]["replicas"] == 1
    deployment = the(render(values(POSTGRES, api__replicas=3)), "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (3, "RollingUpdate")
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_file_of_sqlite_is_one_process_and_outlives_the_release() -> None:
    objects = render()
    assert the(objects, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    claim = the(objects, "PersistentVolumeClaim", f"{NAME}-database")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    home = the_volume(pod(objects, NAME), "/var/lib/boost")
    assert home == {"name": "home", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert (
        of_kind(
            render(values(database__sqlite__existingClaim="mine")), "PersistentVolumeClaim", claim["metadata"]["name"]
        )
        == []
    )
    assert environment(pod(objects, NAME)).keys().isdisjoint({"BOOST_DATABASE_URL"})


def the_volume(template: Object, path: str) -> Object:
    (mount,) = (
        mount for mount in template["spec"]["containers"][0]["volumeMounts"] if mount["mountPath"] == path
    )  # fmt: skip
    (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == mount["name"])
    found: Object = volume
    return found


def test_migrations_come_before_all_else() -> None:
    assert of_kind(render(), "Job") == [], "SQLite's volume is not there yet; the replica does it when it starts"
    job = the(render(POSTGRES), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade,pre-rollback"
    template = job["spec"]["template"]
    assert template["spec"]["containers"][0]["command"] == ["boost", "migrate"]
    assert environment(template)["BOOST_DATABASE_URL"] == "secret:boost-database/url"
    assert "serviceAccountName" not in template["spec"], "the chart's accounts are not there yet"
    assert {next(iter(volume.keys() - {"name"})) for volume in template["spec"]["volumes"]} == {"emptyDir"}


def test_hooks_run_where_replicas_do() -> None:
    certificate = {"name": "ca", "configMap": {"name": "ca"}}
    mount, variable = {"name": "ca", "mountPath": "/ca"}, {"name": "PGSSLROOTCERT", "value": "/ca/ca.crt"}
    spec = {
        "priorityClassName": "training", "volumes": [certificate, {"name": "tls", "secret": {"optional": True}}],
        "containers": [{"name": "api", "env": [variable], "volumeMounts": [mount]}, {"name": "logs", "image": "l:1"}],
    }  # fmt: skip
    api = {
        "nodeSelector": {"pool": "system"}, "tolerations": [{"operator": "Exists"}], "podLabels": {"cost": "lab"},
        "podAnnotations": {"inject": "false"}, "podSpec": spec, "tls": {"existingSecret": "tls"},
    }  # fmt: skip
    objects = render(values(POSTGRES, api=api))
    replica = pod(objects, NAME)
    for hook in (pod(objects, "-migrations"), pod(objects, "-test")):
        for field in ("nodeSelector", "tolerations", "priorityClassName", "securityContext"):
            assert hook["spec"][field] == replica["spec"][field]
        assert hook["metadata"]["labels"]["cost"] == "lab"
        assert hook["metadata"]["annotations"]["inject"] == "false"
        (container,) = hook["spec"]["containers"]
        assert variable in container["env"] and mount in container["volumeMounts"]
        assert certificate in hook["spec"]["volumes"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {
            each["name"] for each in hook["spec"]["volumes"]
        }
        assert "tls" not in {volume["name"] for volume in hook["spec"]["volumes"]}, (
            "a patch of a volume that is no hook's"
        )
        assert hook["spec"]["restartPolicy"] == "Never" and "serviceAccountName" not in hook["spec"]
    for manifest in objects:
        check(manifest)


def test_a_replica_that_goes_drains() -> None:
    spec = pod(render(values(api__drainSeconds=9, api__terminationGracePeriodSeconds=90)), NAME)["spec"]
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 9}}}
    at_once = pod(render(values(api__drainSeconds=0)), NAME)["spec"]["containers"][0]
    assert "lifecycle" not in at_once, "Kubernetes before 1.33 refuses to sleep for 0 seconds"
    assert spec["containers"][0]["command"] == ["boost", "serve"], "gets SIGTERM itself: no shell between"


def test_replicas_are_spread() -> None:
    objects = render(POSTGRES)
    spread = pod(objects, NAME)["spec"]["topologySpreadConstraints"]
    assert {each["topologyKey"] for each in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    selector = the(objects, "Deployment")["spec"]["selector"]
    assert all(each["labelSelector"] == selector for each in spread)


def test_selectors_find_pods_and_hold_no_versions() -> None:
    objects = render(values(POSTGRES, OPEN, monitoring={"existingSecret": "k", "serviceMonitor": {"enabled": True}}))
    labels = pod(objects, NAME)["metadata"]["labels"].items()
    service = the(objects, "Service")
    budgets = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "PodDisruptionBudget")}
    for selector in (
        the(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budgets[NAME]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
        assert not [value for value in selector.values() if boost_core.__version__ in value]
    monitor = the(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= service["metadata"]["labels"].items()


def test_budgets() -> None:
    objects = render()
    assert the(objects, "PodDisruptionBudget", NAME)["spec"]["maxUnavailable"] == 1
    head = the(objects, "PodDisruptionBudget", f"{NAME}-head")["spec"]
    assert head["minAvailable"] == 1
    assert head["selector"]["matchLabels"] == {"ray.io/cluster": NAME, "ray.io/node-type": "head"}
    none = values(api__podDisruptionBudget__enabled=False, ray__head__podDisruptionBudget__enabled=False)
    assert of_kind(render(none), "PodDisruptionBudget") == []


def test_the_number_of_replicas_may_follow_their_load() -> None:
    objects = render(values(POSTGRES, api__autoscaling={"enabled": True, "minReplicas": 3, "maxReplicas": 5}))
    assert "replicas" not in the(objects, "Deployment")["spec"], "or each upgrade would set them back"
    scaler = the(objects, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 5)


def test_ingress() -> None:
    assert of_kind(render(), "Ingress") == []
    objects = render(
        values(OPEN, ingress={"enabled": True, "host": "b.example.org", "tlsSecret": "cert", "className": "nginx"})
    )
    ingress = the(objects, "Ingress")["spec"]
    assert ingress["tls"] == [{"hosts": ["b.example.org"], "secretName": "cert"}]
    (rule,) = ingress["rules"]
    assert (rule["host"], ingress["ingressClassName"]) == ("b.example.org", "nginx")
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": NAME, "port": {"name": "http"}}
    assert environment(pod(objects, NAME))["BOOST_PUBLIC_URL"] == "https://b.example.org"


def test_the_api_may_speak_https_itself() -> None:
    monitoring = {"existingSecret": "k", "serviceMonitor": {"enabled": True}, "scrapeConfig": {"enabled": True}}
    objects = render(values(OPEN, api__tls={"existingSecret": "tls", "caKey": "ca.crt"}, monitoring=monitoring))
    template = pod(objects, NAME)
    said = environment(template)
    assert (said["BOOST_TLS_CERT"], said["BOOST_TLS_KEY"]) == ("/etc/boost/tls/tls.crt", "/etc/boost/tls/tls.key")
    assert "BOOST_TLS" not in said
    assert the_volume(template, "/etc/boost/tls")["secret"]["secretName"] == "tls"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert template["spec"]["containers"][0][probe]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = the(objects, "ServiceMonitor")["spec"]["endpoints"]
    expected = {"serverName": f"{NAME}.ml.svc", "ca": {"secret": {"name": "tls", "key": "ca.crt"}}}
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", expected)
    (discovery,) = the(objects, "ScrapeConfig")["spec"]["httpSDConfigs"]
    assert (discovery["url"], discovery["tlsConfig"]) == (f"https://{NAME}.ml.svc:8900/v1/metrics/targets", expected)


def test_tenants_secrets_are_the_same_on_all_nodes() -> None:
    given = [{"tenant": "lab", "name": "team-s3", "existingSecret": "lab-team-s3"}]
    objects = render(nested("tenantSecrets", given))
    for name in (NAME, "/head", "/gpu"):
        volume = the_volume(pod(objects, name), "/etc/boost/secrets/lab/team-s3")
        assert volume["secret"]["secretName"] == "lab-team-s3"
        assert volume["secret"]["optional"], "one that is missing must not stop the pods of all tenants"
        assert len(volume["name"]) <= 63
    assert environment(pod(objects, NAME))["BOOST_SECRETS_DIR"] == "/etc/boost/secrets"


def test_keys_of_the_store_are_named() -> None:
    objects = render(nested("envFrom", ["boost-s3"]))
    for name in (NAME, "/head", "/gpu"):
        assert pod(objects, name)["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "boost-s3"}}]
    assert "envFrom" not in pod(render(), NAME)["spec"]["containers"][0]


def test_the_api_is_reached_while_ray_is_away() -> None:
    container = pod(render(), NAME)["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"


def test_data_and_checkpoints_are_the_same_on_all_nodes() -> None:
    objects = render(nested("data", [{"name": "corpus", "claim": "corpus-claim", "mountPath": "/data/corpus"}]))
    for name in (NAME, "/head", "/gpu"):
        corpus = the_volume(pod(objects, name), "/data/corpus")["persistentVolumeClaim"]
        assert corpus == {"claimName": "corpus-claim", "readOnly": True}
        kept = the_volume(pod(objects, name), "/var/lib/boost-checkpoints")["persistentVolumeClaim"]
        assert kept == {"claimName": f"{NAME}-checkpoints"}
    assert environment(pod(objects, NAME))["BOOST_CHECKPOINT_ROOT"] == "file:///var/lib/boost-checkpoints"


def test_ray_asks_everybody_for_its_token() -> None:
    objects = render()
    token = the(objects, "Secret")
    assert len(base64.b64decode(token["data"]["auth_token"])) == 64
    for name, template in pod_templates(objects):
        if name.startswith("RayCluster"):
            assert environment(template)["RAY_AUTH_MODE"] == "token"
            assert environment(template)["RAY_AUTH_TOKEN_PATH"] == "/etc/boost/ray/token"
    assert environment(pod(objects, NAME))["BOOST_RAY_TOKEN_FILE"] == "/etc/boost/ray/token"
    for name in (NAME, "/head", "/gpu"):
        volume = the_volume(pod(objects, name), "/etc/boost/ray")["secret"]
        assert volume["secretName"] == token["metadata"]["name"]
        assert volume["items"] == [{"key": "auth_token", "path": "token"}]


def test_a_token_that_is_there_is_used() -> None:
    objects = render(nested("ray.token.existingSecret", "mine"))
    assert of_kind(objects, "Secret") == []
    assert the_volume(pod(objects, "/gpu"), "/etc/boost/ray")["secret"]["secretName"] == "mine"


def test_the_api_finds_the_head() -> None:
    assert environment(pod(render(), NAME))["BOOST_RAY_ADDRESS"] == f"{NAME}-head-svc:6379"
    long = the(render(release="a-release-with-a-name-of-more-than-forty-letters"), "RayCluster")["metadata"]["name"]
    assert len(f"{long}-head-svc") <= 50, "KubeRay cuts longer ones"
    elsewhere = {"enabled": False, "address": "ray.example.org:6379", "token": {"existingSecret": "token"}}
    objects = render(values(OPEN, ray=elsewhere))
    assert environment(pod(objects, NAME))["BOOST_RAY_ADDRESS"] == "ray.example.org:6379"
    kinds = {found["kind"] for found in objects}
    assert "RayCluster" not in kinds
    assert [found["metadata"]["name"] for found in of_kind(objects, "ServiceAccount")] == [f"{NAME}-api"]


def test_the_head_holds_no_ranks() -> None:
    head = spec_of_cluster()["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_worker_groups() -> None:
    group = GROUP | {
        "name": "h100", "memory": "640Gi", "maxReplicas": 9, "replicas": 4, "gpus": 8, "sharedMemory": "200Gi",
        "labels": {"pool": "h100"}, "nodeSelector": {"gpu": "h100"}, "extraResources": {"rdma/hca": 8},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "podAnnotations": {"network": "ib"},
    }  # fmt: skip
    gpus, cpus = spec_of_cluster(ray__workerGroups=[group, GROUP])["workerGroupSpecs"]
    assert (gpus["groupName"], gpus["replicas"], gpus["minReplicas"], gpus["maxReplicas"]) == ("h100", 4, 1, 9)
    assert gpus["labels"] == {"pool": "h100"}
    template = gpus["template"]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "640Gi", "nvidia.com/gpu": "8", "rdma/hca": 8}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert the_volume(template, "/dev/shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "200Gi"}
    assert template["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert template["spec"]["tolerations"] == group["tolerations"]
    assert template["metadata"]["annotations"] == {"network": "ib"}
    assert (cpus["replicas"], "labels" in cpus) == (1, False)
    assert "nvidia.com/gpu" not in cpus["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_a_group_has_what_its_fabric_needs() -> None:
    wanted = {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 0, "runAsNonRoot": False}
    given = values(
        OPEN, ray__workerGroups=[GROUP | {"name": "ib", "securityContext": wanted, "hostNetwork": True}, GROUP]
    )
    fast, plain = (group["template"]["spec"] for group in spec_of_cluster(given)["workerGroupSpecs"])
    security = fast["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
    assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
    assert (fast["hostNetwork"], fast["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert [port["containerPort"] for port in fast["containers"][0]["ports"]] == [52365], "one pod on each node"
    assert plain["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostNetwork" not in plain and "ports" not in plain["containers"][0]
    for manifest in render(given):
        check(manifest)


@pytest.mark.parametrize(
    "wanted", [{"privileged": True}, *({"capabilities": {"add": [name]}} for name in ("SYS_ADMIN", "CAP_SYS_ADMIN"))]
)
def test_what_may_do_all_is_not_kept_from_gaining_rights(wanted: Values) -> None:
    said = {"podSpec": {"containers": [{"name": "ray-worker", "securityContext": wanted}]}}
    for given in ({"securityContext": wanted}, said):
        (group,) = spec_of_cluster(ray__workerGroups=[GROUP | given])["workerGroupSpecs"]
        security = group["template"]["spec"]["containers"][0]["securityContext"]
        assert "allowPrivilegeEscalation" not in security, "Kubernetes refuses false beside these"
        assert security["capabilities"].items() >= wanted.get("capabilities", {}).items()


def test_a_node_that_goes_gives_notice() -> None:
    (group,) = spec_of_cluster(ray__workerGroups=[GROUP | {"terminationGracePeriodSeconds": 90}])["workerGroupSpecs"]
    spec = group["template"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] == 90
    assert "--deadline-remaining-seconds 80 " in command[-1], "notice ends before the kubelet's patience does"


def test_the_autoscaler_alone_may_ask_kubernetes() -> None:
    objects = render(values(ray__autoscaler__enabled=True))
    spec = the(objects, "RayCluster")["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    options = spec["autoscalerOptions"]
    assert options["version"] == "v2"
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert token in [mount["mountPath"] for mount in options["volumeMounts"]]
    volumes = {volume["name"] for volume in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in options["volumeMounts"]} <= volumes
    for _, template in pod_templates(objects):
        mounts = template["spec"]["containers"][0].get("volumeMounts", [])
        assert token not in [mount["mountPath"] for mount in mounts]
    for name in ("/head", "/gpu"):
        assert pod(objects, name)["spec"]["restartPolicy"] == "Never", "the autoscaler replaces nodes"
    assert environment(pod(objects, NAME))["BOOST_AUTOSCALING"] == "true"
    assert "BOOST_AUTOSCALING" not in environment(pod(render(), NAME))
    assert "autoscalerOptions" not in spec_of_cluster()


def test_no_rights_are_given() -> None:
    kinds = {found["kind"] for found in render(values(ray__autoscaler__enabled=True))}
    assert not {kind for kind in kinds if "Role" in kind}, "KubeRay binds the autoscaler's to the head's account"


def test_gangs_are_placed_by_whom_one_likes() -> None:
    def labels(**how: str) -> set[str]:
        found = the(render(nested("ray.gangScheduling", how)), "RayCluster")["metadata"]["labels"]
        return {f"{name}={value}" for name, value in found.items() if not name.startswith(("app.", "helm."))}

    assert labels() == set()
    assert labels(by="kueue", queue="training") == {"kueue.x-k8s.io/queue-name=training"}
    volcano = {"ray.io/scheduler-name=volcano", "volcano.sh/queue-name=q", "ray.io/priority-class-name=p"}
    assert labels(by="volcano", queue="q", priorityClass="p") == volcano


def test_accounts_have_identities() -> None:
    role = {"iam.gke.io/gcp-service-account": "boost@project"}
    objects = render(values(serviceAccounts={"workers": {"annotations": role}, "head": {"existingName": "mine"}}))
    accounts = {found["metadata"]["name"]: found for found in of_kind(objects, "ServiceAccount")}
    assert accounts.keys() == {f"{NAME}-api", f"{NAME}-workers"}
    assert accounts[f"{NAME}-workers"]["metadata"]["annotations"] == role
    assert all(found["automountServiceAccountToken"] is False for found in accounts.values())
    used = [pod(objects, name)["spec"]["serviceAccountName"] for name in (NAME, "/head", "/gpu")]
    assert used == [f"{NAME}-api", "mine", f"{NAME}-workers"]


def test_images() -> None:
    def images(**image: str) -> set[str]:
        templates = pod_templates(render(nested("image", image)))
        return {template["spec"]["containers"][0]["image"] for _, template in templates}

    version = boost_core.__version__
    assert images() == {f"boost-api:{version}", f"boost-trainer:{version}"}
    assert images(registry="r.example.org:5000/ml", tag="1.2") == {
        "r.example.org:5000/ml/boost-api:1.2", "r.example.org:5000/ml/boost-trainer:1.2",
    }  # fmt: skip
    for variant in ("cpu", "cu128", "devel", "a100", "b200", "12.8", "2026.11"):
        tag = f"{version}-{variant}"
        assert images(trainerTag=tag) == {f"boost-api:{version}", f"boost-trainer:{tag}"}


def test_prometheus_finds_api_and_ranks() -> None:
    key = {"type": "Bearer", "credentials": {"name": "boost-prometheus", "key": "key"}}
    objects = render(read_values(CHART / "ci" / "one-gpu-values.yaml"))
    (endpoint,) = the(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["path"], endpoint["authorization"], endpoint["scheme"]) == ("/metrics", key, "http")
    given = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
    assert given == {"namespace": "ml", "release": "lab", "job": "boost-api"}
    ranks = the(objects, "ScrapeConfig")["spec"]
    (discovery,) = ranks["httpSDConfigs"]
    assert ranks["jobName"] == "boost-ranks"
    assert discovery["url"] == f"http://{NAME}.ml.svc:8900/v1/metrics/targets"
    assert discovery["authorization"] == key


def test_helm_test_asks_the_service() -> None:
    test = the(render(values(service__port=80)), "Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert test["spec"]["containers"][0]["command"][-1] == f"http://{NAME}:80/readyz"


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "status"), [(Answer(200, {"status": "ready"}), 0), (problem(503, "Ray is away"), 1)]
)
def test_helm_test_fails_while_ray_is_away(answer: Answer, status: int) -> None:
    _, *arguments, url = the(render(), "Pod")["spec"]["containers"][0]["command"]
    with serving({"GET /readyz": answer}) as server:
        asked = [sys.executable, *arguments, server.url + url[url.rindex("/") :]]
        done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == status
    assert ("Ray is away" in done.stderr) == bool(status)


def test_notes_say_how_to_begin() -> None:
    notes = chart().render({}, name="lab", namespace="ml")["boost/templates/NOTES.txt"]
    assert f"kubectl -n ml exec deploy/{NAME} -- boost keys create admin --tenant ops --scope admin --direct" in notes
    assert "port-forward" in notes and "of one version" not in notes
    upgrade = chart().render({}, name="lab", namespace="ml", is_upgrade=True)["boost/templates/NOTES.txt"]
    assert f"of one version: {boost_core.__version__}" in upgrade and "/readyz" in upgrade
    assert "replaces all of them, the head too" in upgrade
    assert "needs but its token" in chart().render(nested("networkPolicy.enabled", False))["boost/templates/NOTES.txt"]


def test_resources_are_as_written() -> None:
    text = (CHART / "values.yaml").read_text()
    assert pod(render(), NAME)["spec"]["containers"][0]["resources"] == yaml.safe_load(text)["api"]["resources"]
