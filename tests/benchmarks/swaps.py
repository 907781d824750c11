"""A tenant swaps its folders for links to another tenant's while a service uses them: how much of it gets out.

    python -m tests.benchmarks.swaps [--seconds 60]

A service with a Ray of its own, two tenants on one file system. Each has trained a job and built a dataset. Then one of
them replaces the folder of its job and its corpus with links and back, over and over, while it lists, shows, pins and
deletes checkpoints, checks job files, has datasets built, which wait in the service's queue, and jobs trained that read
the corpus and start from the checkpoints. The command prints how these ended, and exits with 1 if anything of the other
tenant was read, listed, pinned, changed or deleted.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from service.accounts.keys import KeyStore
from service.models.access import Scope
from tests.jobs import tiny_job
from tests.service.serving import Server
from tests.swapping import PAUSES, snapshot, swapping

WORDS = {"lab": "mine ", "others": "private "}
STEPS = {"lab": 10, "others": 15}  # how often each tenant's job saves: their checkpoints' steps tell them apart
PATIENCE_SECONDS = 180
Json = dict[str, Any]


def shows(content: bytes) -> bool:
    """Whether text or tokens (of the tokenizer of bytes, of 16 or 32 bits) are of the other tenant."""
    word = WORDS["others"].strip()
    return any(word.encode(coding) in content for coding in ("utf-8", "utf-16-le", "utf-32-le"))


class Tenant:
    """A tenant with a corpus, and what it asks of the service."""

    def __init__(self, name: str, server: Server, home: Path, root: Path) -> None:
        self.name, self.corpus, self.root = name, root / "data" / name / "corpus", root
        self.corpus.mkdir(parents=True)
        for number in range(40):
            (self.corpus / f"{number}.txt").write_text(WORDS[name] * 200)
        key = KeyStore(f"sqlite:///{home}/boost.db").create(f"{name}'s", name, [Scope.SUBMIT]).key
        self.http = httpx.Client(
            base_url=f"{server.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS
        )

    def spec(self, steps: int, **checkpoint: object) -> Json:
        spec = tiny_job(
            self.corpus, "placeholder", parallelism={"tensor_parallel_size": 1}, training={"steps": steps}
        ).model_dump(mode="json", exclude_unset=True)
        return spec | {"checkpoint": {"every_steps": STEPS[self.name], **checkpoint}}

    def build(self, name: str) -> httpx.Response:
        source = {"kind": "text", "paths": [str(self.corpus)]}
        request = {"name": name, "source": source, "url": str(self.corpus.parent), "on_error": "skip"}
        return self.http.post("/datasets", json=request)

    def end_of(self, path: str, active: tuple[str, ...]) -> Json:
        """What a job or a dataset is when it is no longer active."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (answer := self.http.get(path).raise_for_status().json())["state"] in active:
            assert time.monotonic() < until, answer
            time.sleep(0.2)
        assert isinstance(answer, dict)
        return answer

    def train(self, spec: Json) -> Json:
        job = self.http.post("/jobs", json=spec).raise_for_status().json()
        return self.end_of(f"/jobs/{job['id']}", ("QUEUED", "SCHEDULING", "RUNNING"))


def attack(lab: Tenant, job: Json, others: Tenant, theirs: Json, seconds: float) -> tuple[Counter[str], list[str]]:
    """Use what is being swapped for a while. Return how requests, builds and jobs ended, and what got out."""
    ends, leaks, steps = Counter[str](), list[str](), set(range(STEPS["lab"], 1000, STEPS["lab"]))
    at, until, rounds = f"/jobs/{job['id']}/checkpoints", time.monotonic() + seconds, 0
    jobs, datasets = list[str](), list[str]()
    folder, target = (
        Path(job["checkpoint_url"].removeprefix("file://")),
        theirs["checkpoint_url"].removeprefix("file://"),
    )

    def note(what: str, answer: httpx.Response) -> None:
        ends[f"{what}: {answer.status_code}"] += 1
        if shows(answer.content):
            leaks.append(f"{what} answered {answer.text}")

    while time.monotonic() < until:
        with ExitStack() as swaps:
            pause = PAUSES[rounds % len(PAUSES)]
            for own, other in ((folder, Path(target)), (lab.corpus, others.corpus)):
                own.with_name("link").unlink(missing_ok=True)
                swaps.enter_context(swapping(own, other, pause))
            name = f"d{rounds}"
            note("build", answer := lab.build(name))
            datasets += [name] * answer.is_success
            for spec in (lab.spec(20), lab.spec(20, weights_from=str(folder))):
                note("job", answer := lab.http.post("/jobs", json=spec))
                if answer.is_success:
                    jobs.append(answer.json()["id"])
            round_ends = time.monotonic() + 5
            while time.monotonic() < min(until, round_ends):
                note("list", answer := lab.http.get(at))
                if (
                    answer.is_success
                    and not (listed := {each["step"] for each in answer.json()["checkpoints"]}) <= steps
                ):
                    leaks.append(f"checkpoints {listed} were listed")
                for step in sorted({STEPS["others"], 2 * STEPS["others"]}):
                    if step not in steps:
                        one = f"{at}/{step}"
                        for what in (lab.http.get(one), lab.http.put(f"{one}/pin"), lab.http.delete(one)):
                            note(f"another's checkpoint, {what.request.method}", what)
                            if what.is_success:
                                leaks.append(
                                    f"{what.request.method} of another's checkpoint {step}: {what.status_code}"
                                )
                note("dry run", lab.http.post("/jobs/dry-run", json=lab.spec(20)))
        rounds += 1
    for job_id in jobs:  # those that wait start after the last swap; what counts began during it
        lab.http.post(f"/jobs/{job_id}/cancel")
        ended = lab.end_of(f"/jobs/{job_id}", ("QUEUED", "SCHEDULING", "RUNNING", "STOPPING"))
        ends[f"job: {ended['state']}"] += 1
    for name in datasets:
        lab.http.post(f"/datasets/{name}/cancel")
        ended = lab.end_of(f"/datasets/{name}", ("BUILDING",))
        ends[f"dataset: {ended['state']}"] += 1
        if shows(str(ended).encode()):
            leaks.append(f"dataset {name} shows {ended}")
    return ends, leaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="swaps-") as folder:
        root = Path(folder)
        server = Server(
            root / "home", BOOST_CHECKPOINT_ROOT=f"file://{root}/runs",
            BOOST_ALLOWED_PREFIXES=f"{root}/data/{{tenant}}", BOOST_RATE_PER_SECOND="10000",
        )  # fmt: skip
        try:
            server.until(lambda: (answer := server.answers("/readyz")) is not None and answer.is_success)
            lab, others = (Tenant(name, server, root / "home", root) for name in WORDS)
            job, theirs = (tenant.train(tenant.spec(3 * STEPS[tenant.name])) for tenant in (lab, others))
            assert others.build("theirs").is_success
            dataset = others.end_of("/datasets/theirs", ("BUILDING",))
            there = (Path(theirs["checkpoint_url"].removeprefix("file://")), others.corpus.parent)
            before = [snapshot(each) for each in there]
            assert any(shows(content) for content in before[1].values()), "a leak would be noticed"
            assert dataset["state"] == "READY", dataset
            ends, leaks = attack(lab, job, others, theirs, seconds)
            if [snapshot(each) for each in there] != before:
                leaks.append("the other tenant's files have changed")
            for own in (root / "data" / "lab", root / "runs" / "lab"):
                leaks += [f"{path} has text of the other tenant" for path, data in snapshot(own).items() if shows(data)]
        finally:
            server.end(signal.SIGTERM)
    lines = [f"{times:6} {end}" for end, times in sorted(ends.items())]
    sys.stdout.write("\n".join([*lines, f"{len(leaks)} leaks in {seconds:.0f} s", *leaks]) + "\n")
    sys.exit(bool(leaks))


if __name__ == "__main__":
    main()
