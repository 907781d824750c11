"""Several hosts on this machine: network namespaces on a bridge. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network of its own; files and processes are shared with the others."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *command]


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that reach each other and this one, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2; run as root after: apt-get install iproute2")
    need_namespaces()
    mark = os.getpid()
    network = f"10.{200 + mark // 256 % 50}.{mark % 256}"
    bridge = f"boost{mark}"
    with ExitStack() as undo:
        _ip(f"link add {bridge} type bridge")
        undo.callback(_ip, f"link delete {bridge}")
        _ip(f"address add {network}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        made = []
        for number in range(count):
            host = Host(f"{bridge}h{number}", f"{network}.{number + 2}")
            _ip(f"netns add {host.name}")
            undo.callback(_ip, f"netns delete {host.name}")
            _ip(f"link add b{mark}h{number} type veth peer name eth0 netns {host.name}")
            _ip(f"link set b{mark}h{number} master {bridge} up")
            _ip(f"-n {host.name} address add {host.address}/24 dev eth0")
            _ip(f"-n {host.name} link set eth0 up")
            _ip(f"-n {host.name} link set lo up")
            made.append(host)
        yield made


def need_namespaces(*options: str) -> None:
    """Skip a test where namespaces may not be made, as in a container without the right to."""
    alone = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", *options]
    made = subprocess.run([*alone, "ip", "link", "add", "probe", "type", "bridge"], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"this machine allows no namespaces and bridges: {made.stderr.strip()}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
