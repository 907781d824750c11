"""The job files in the folder ``examples``, which are installed with the service."""

from functools import cache
from itertools import takewhile
from pathlib import Path

from boost_core.config.job import load_job
from service.models.examples import JobExample, JobExampleList

_FOLDER = Path(__file__).parents[1] / "examples"


@cache
def job_examples() -> JobExampleList:
    """All examples, those that need no GPU first; each is described by the comment at the top of its file."""
    files = sorted(_FOLDER.glob("*.yaml"), key=lambda file: (load_job(file).resources.gpus_per_worker, file.stem))
    return JobExampleList(examples=[_example(file.stem, file.read_text(encoding="utf-8")) for file in files])


def _example(name: str, text: str) -> JobExample:
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return JobExample(name=name, description=" ".join(line.lstrip("# ") for line in comment), text=text)
