"""The images: how their Dockerfiles are written, and what the API's file system does.

No container engine is needed. What stands for a build: the commands of the API image's builder stage are taken from its
Dockerfile and run with this machine's Python in place of the base image; only the folders of the sources and of the
installation are others. What stands for a container: a process on a host of its own, as the image's user, with a file
system that can only be read but for /tmp and the service's home. What is not shown: that the base images are to be had,
and the steps with Debian's packages and with the trainer's torch.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deploy.dockerfile import ROOT, Dockerfile, read
from tests.hosts import hosts, need_namespaces
from tests.jobs import tiny_job, write_corpus
from tests.joined_cluster import OutsideService, cluster, first_key

FILES = {name: ROOT / "docker" / f"{name}.Dockerfile" for name in ("api", "trainer")}
API = read(FILES["api"])
TRAINERS = {"torch", "triton", "safetensors", "tokenizers"}  # Ray Train brings numpy and pyarrow


@pytest.fixture(params=FILES)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read(FILES[request.param])


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, *FILES.values()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert not [line for file in FILES.values() for line in file.read_text().splitlines() if "hadolint ignore" in line]


def test_both_have_one_base_with_the_tested_python() -> None:
    bases = {instruction.text for name in FILES for instruction in read(FILES[name]).preamble}
    (base,) = bases
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+", base), base


def test_each_is_small_unprivileged_and_watched(dockerfile: Dockerfile) -> None:
    assert [stage[0].text for stage in dockerfile.stages] == ["${PYTHON_IMAGE} AS builder", "${PYTHON_IMAGE}"]
    image = dockerfile.image
    assert [user.text for user in image["USER"]] == ["65532:65532"]
    assert json.loads(image["VOLUME"][0].text) == ["/tmp", "/home/boost", "/var/lib/boost"]
    assert image["HEALTHCHECK"] and image["LABEL"] and image["STOPSIGNAL"][0].text == "SIGTERM"


def test_what_is_copied_is_sent_to_the_builder_and_nothing_else(dockerfile: Dockerfile) -> None:
    copies = [step.words[:-1] for stage in dockerfile.stages for step in stage if step.name == "COPY"]
    sources = {source for words in copies for source in words if not source.startswith("/")}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources <= sent
    assert not [source for source in sent if not (ROOT / source).exists()]
    assert "\n*\n" in (ROOT / ".dockerignore").read_text()


def test_every_package_is_pinned(dockerfile: Dockerfile) -> None:
    for step in dockerfile.stage("builder"):
        if step.name == "RUN" and "install" in step.text:
            assert "--constraint constraints.txt" in step.text


def test_nccl_finds_the_fabric() -> None:
    (step,) = (step for step in read(FILES["trainer"]).image["RUN"] if "apt-get install" in step.command)
    installed = {word.partition("=")[0] for word in step.words}
    assert installed >= {"libibverbs1", "ibverbs-providers"}


class Image:
    """What the API's builder stage makes, in a folder that everybody can read.

    The machine's Python may be in a folder that not everybody can read, so it is mounted beside it for who uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.boost, self._base = folder / "boost", folder / "base"
        self._base.mkdir()
        source = folder / "source"
        source.mkdir()
        for step in API.stage("builder"):
            if step.name == "COPY":
                *names, _ = step.words
                for name in names:
                    _copy(ROOT / name, source / name)
            elif step.name == "RUN":
                command = self.mounted("sh", "-ec", step.command.replace("/opt/boost", str(self.boost)))
                path = f"{self._base}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
                # Of ten thousand modules few are ever imported: those are compiled then.
                environment = os.environ | {"PATH": path, "PIP_NO_COMPILE": "1"}
                subprocess.run(command, cwd=source, env=environment, check=True)
        shutil.copy(ROOT / "docker/healthcheck.py", self.boost)

    def mounted(self, *command: str, also: tuple[str, ...] = ()) -> list[str]:
        """A command that finds the Python, after some more commands that change what is mounted for it."""
        # A Python that keeps itself in a library looks for it where it was built to be.
        mounts = [f"mount --bind {sys.base_prefix} {self._base}", f"export LD_LIBRARY_PATH={self._base}/lib", *also]
        return ["unshare", "--mount", "sh", "-ec", " && ".join([*mounts, f"exec {shlex.join(command)}"])]

    def run(self, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = self.mounted(str(self.boost / "bin" / program), *arguments)
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)

    def contained(self, *volumes: Path) -> list[str]:
        """How the container's process is started: it can write to /tmp, which is empty, and to some folders."""
        also = ["mount -t tmpfs -o mode=1777 tmpfs /tmp"]
        also += [f"mount --bind {volume} {volume}" for volume in volumes]
        also += ["mount -o remount,bind,ro /"]
        start = [*json.loads(API.image["ENTRYPOINT"][0].text), *json.loads(API.image["CMD"][0].text)]
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *as_its_user(*start)]
        return self.mounted(*alone, also=tuple(also))

    def environment(self) -> dict[str, str]:
        """What the Dockerfile says, and nothing of this process's own."""
        said = dict(word.split("=", 1) for step in API.image["ENV"] for word in step.words)
        said["PATH"] = said["PATH"].replace("/opt/boost", str(self.boost)).replace("$PATH", "/usr/sbin:/usr/bin:/bin")
        return said


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def as_its_user(*command: str) -> list[str]:
    user, _, group = API.image["USER"][0].text.partition(":")
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={group}",
        "--clear-groups",
        "--no-new-privs",
        "--pdeathsig=keep",
        *command,
    ]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("to be another user on another host, the test has to be root")
    need_namespaces()
    with tempfile.TemporaryDirectory(prefix="boost-image-", dir="/var/tmp") as made:
        path = Path(made)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def image(folder: Path) -> Image:
    return Image(folder)


@pytest.mark.nightly
def test_it_has_nothing_to_train_with(image: Image) -> None:
    found = image.run(
        "python", "-c", "import importlib.metadata as m; print(*[each.name for each in m.distributions()])"
    )
    assert "ray" in found.stdout.split(), found.stderr
    assert not TRAINERS & set(found.stdout.split())


@pytest.mark.nightly
def test_it_says_what_it_cannot_do(image: Image, tmp_path: Path) -> None:
    for command in (["bench", "kernels"], ["data", "tokenize", "texts", "tokens"], ["serve", "--no-auth"]):
        done = image.run("boost", *command, BOOST_HOME=str(tmp_path))
        assert done.returncode == 1
        assert "install boost-service[trainer]" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.nightly
def test_a_container_schedules_on_a_cluster(image: Image, folder: Path) -> None:
    home, token, corpus = folder / "home", folder / "token", write_corpus(folder / "corpus")
    token.write_text("cd" * 32)
    key = first_key(home)
    for owned in (home, home / "boost.db", token):
        shutil.chown(owned, 65532, 65532)
    with hosts(3) as (head, worker, outside), cluster(head, worker, token) as address:
        environment = image.environment() | {
            "BOOST_RAY_ADDRESS": address, "BOOST_RAY_TOKEN_FILE": str(token), "BOOST_ALLOWED_PREFIXES": str(corpus),
            "BOOST_CHECKPOINT_ROOT": f"file://{folder}/checkpoints",
        }  # fmt: skip
        service = OutsideService(outside, home, key, image.contained(home), environment)
        try:
            service.until(lambda: service.readiness()[0] == 200)
            service.until(lambda: service.client.nodes().nodes)
            (container,) = psutil.Process(service.process.pid).children()
            assert container.uids().effective == 65532
            assert run_healthcheck(image, container) == 0
            job = service.client.submit(tiny_job(corpus, "unused", checkpoint={"url": None, "every_steps": 4})).id
            service.until(lambda: service.client.get(job).finished)
            assert service.client.get(job).state == "SUCCEEDED"
            assert [found.step for found in service.client.checkpoints(job).checkpoints] == [8, 4]
            container.terminate()
            assert service.process.wait(60) == 0
        finally:
            service.process.kill()
            service.process.wait()


def run_healthcheck(image: Image, container: psutil.Process) -> int:
    check = json.loads(API.image["HEALTHCHECK"][0].text.partition("CMD ")[2])
    command = [word.replace("/opt/boost", str(image.boost)) for word in as_its_user(*check)]
    inside = ["nsenter", f"--target={container.pid}", "--mount", "--pid", "--net", *command]
    return subprocess.run(inside, env=container.environ()).returncode
