"""A pod of Ray that is to end: ``python -m tests.deploy.leaving COMMAND`` in namespaces of its own.

COMMAND is what the kubelet runs before it ends the pod. While an actor holds the node's CPU it has to wait.
"""

import os
import subprocess
import sys
import time

import ray

from service.gang.ray.private_api import draining_nodes
from tests.s3 import free_ports

HOLDS_SECONDS = 3.0
PATIENCE_SECONDS = 60.0


@ray.remote(num_cpus=1)
class Rank:
    def works(self) -> bool:
        return True


def main(command: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    node = ["--head", f"--port={address.partition(':')[2]}", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    subprocess.Popen(["ray", "start", *node, "--include-dashboard=false", "--block"])  # as KubeRay does
    until(lambda: answers(address))
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    rank = Rank.remote()
    assert ray.get(rank.works.remote())

    leaving = subprocess.Popen(["/bin/bash", "-c", command], env=os.environ | {"RAY_ADDRESS": address})
    notice = until(draining_nodes)
    (deadline,) = notice.values()
    assert deadline is not None
    assert 90 < deadline - time.time() < 111, "of the 120 s of the pod's grace, 10 are kept"
    time.sleep(HOLDS_SECONDS)
    assert leaving.poll() is None, "it did not wait for the rank"
    assert ray.get(rank.works.remote())
    ray.kill(rank)
    assert leaving.wait(PATIENCE_SECONDS) == 0
    os._exit(0)  # Ray's own end waits for the node, which is gone


def answers(address: str) -> bool:
    return subprocess.run(["ray", "health-check", f"--address={address}"], capture_output=True).returncode == 0


def until(asked):
    end = time.monotonic() + PATIENCE_SECONDS
    while not (answer := asked()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return answer


if __name__ == "__main__":
    main(sys.argv[1])
