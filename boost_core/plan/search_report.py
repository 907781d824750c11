"""What a search found, as people and programs read it."""

from dataclasses import asdict
from math import inf
from typing import Any, Literal

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.plan.devices import device_bytes
from boost_core.plan.machine import Machine
from boost_core.plan.report import StepParts
from boost_core.plan.search import Choice, reasons, search, sensitivities


class PlannedChoice(Config):
    """One way to train the job."""

    text: str
    patch: dict[str, Any] = Field(description="JSON merge patch that makes it of the job.")
    world_size: int
    memory_bytes: int = Field(description="Of the rank that needs most.")
    step_seconds: float
    step_seconds_range: tuple[float, float] = Field(description="Between which eight of ten steps are expected.")
    step_parts: StepParts
    tokens_per_second: float


class SearchReport(Config):
    """The best ways to train a job on some GPUs."""

    choices: tuple[PlannedChoice, ...] = Field(description="The fastest first; none if nothing fits.")
    combinations: int = Field(description="Of sizes, micro-batches and schedules that were timed.")
    device_memory_bytes: int | None = Field(description="Of the requested GPU model; null if that is not known.")
    provenance: Literal["measured", "assumed"]
    why: tuple[str, ...] = Field(description="Deciding term, the next best, and the nearest that does not fit.")
    would_change: tuple[str, ...] = Field(description="Inputs that, changed by 20 %, would change the choice.")


def search_report(spec: JobSpec, gpus: int, machine: Machine, top: int = 5, explain: bool = False) -> SearchReport:
    """Search and report.

    Args:
        spec: The job.
        gpus: How many there are at most.
        machine: What they are.
        top: How many choices to give.
        explain: Whether to find out what would change the choice, which takes a search for each input and direction.
    """
    device = device_bytes(spec.resources)
    limit = inf if device is None else device
    found = search(spec, gpus, machine, limit, top)
    return SearchReport(
        choices=tuple(_planned(choice, machine) for choice in found.choices),
        combinations=found.timed,
        device_memory_bytes=device,
        provenance="measured" if machine.profile.measured else "assumed",
        why=tuple(reasons(found, limit)),
        would_change=tuple(sensitivities(spec, gpus, machine, limit)) if explain else (),
    )


def _planned(choice: Choice, machine: Machine) -> PlannedChoice:
    training, seconds = choice.job.training, choice.seconds.total
    return PlannedChoice(
        text=str(choice),
        patch=choice.patch,
        world_size=choice.layout.world_size,
        memory_bytes=choice.needed,
        step_seconds=seconds,
        step_seconds_range=machine.profile.range_of(seconds),
        step_parts=StepParts(**asdict(choice.seconds)),
        tokens_per_second=training.global_batch_size * training.sequence_length / seconds,
    )
