"""A Ray cluster on this machine whose nodes come when asked for: Ray's own autoscaler with its fake provider."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.service.conftest import free_port

HEAD = "f" * 51 + "00000"  # the id that the fake provider knows the head by
IDLE_SECONDS = 6
RAY = Path(sys.executable).parent / "ray"
PATIENCE_SECONDS = 300

_UNUSED = {  # which Ray misses all the same
    "auth": {}, "docker": {}, "file_mounts": {}, "initialization_commands": [], "setup_commands": [],
    "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
    "worker_start_ray_commands": [], "cluster_synced_files": [], "file_mounts_sync_continuously": False,
    "rsync_exclude": [], "rsync_filter": [],
}  # fmt: skip


def _configuration(address: str, cpus: int, most: int) -> dict[str, object]:
    return {
        "cluster_name": "autoscaled",
        "max_workers": most,
        "provider": {
            "type": "external",  # by its own name it wants a file that Ray's packages leave out
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": HEAD,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": cpus, "object_store_memory": 100 * 2**20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        },
        "head_node_type": "ray.head.default",  # as the fake provider has it
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_SECONDS / 60,
        **_UNUSED,
    }


@contextmanager
def autoscaled_cluster(cpus: int, most: int) -> Iterator[str]:
    """The address of a cluster of a head without CPUs, and of as many nodes as are needed.

    Args:
        cpus: Of a node.
        most: Nodes that there may be.
    """
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="autoscaled-"))  # short: Ray puts sockets there
    address = f"127.0.0.1:{port}"
    (folder / "config.yaml").write_text(json.dumps(_configuration(address, cpus, most)))
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # `ray start` would make a token in the home of who runs this
    }
    options = ["--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=0",
               "--object-store-memory=100000000", "--include-dashboard=false", f"--temp-dir={folder}",
               f"--autoscaling-config={folder}/config.yaml"]  # fmt: skip
    with (folder / "ray.log").open("wb") as log:
        head = subprocess.Popen([RAY, "start", *options], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"Ray runtime started" not in (folder / "ray.log").read_bytes():
            assert head.poll() is None and time.monotonic() < deadline, (folder / "ray.log").read_text()[-5000:]
            time.sleep(0.1)
        yield address
    finally:
        # Nodes that the provider has started are not the head's to end, and it takes half a minute for its own.
        for process in psutil.process_iter(["cmdline"]):
            if str(folder) in " ".join(process.info["cmdline"] or ()):
                process.kill()
        head.wait(PATIENCE_SECONDS)
