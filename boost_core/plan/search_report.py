"""What a search found, as people and programs read it."""

from dataclasses import asdict, replace
from math import inf
from typing import Any

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.messages.reports import PROVENANCE, Provenance
from boost_core.plan.context_report import PlannedContext, context_report
from boost_core.plan.devices import device_bytes
from boost_core.plan.fitted import Fitted
from boost_core.plan.machine import Machine
from boost_core.plan.measured import Basis, MeasuredProfile, machine_of
from boost_core.plan.network import NetworkConfig
from boost_core.plan.report import StepParts
from boost_core.plan.search import Choice, other_orders, reasons, search, sensitivities


class PlanSearch(Config):
    """What the best ways to train a job are searched for."""

    gpus: int = Field(ge=1, le=65_536, description="How many there are at most.")
    cluster: NetworkConfig | None = Field(None, description="Their network; default: nodes of node_gpus.")
    node_gpus: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="GPUs of a node, where cluster is left out; default: as many as the nodes have that the service "
        "sees and that suit the job, else 8.",
    )
    profile: MeasuredProfile | None = Field(
        None,
        description="What `boost bench profile` measured of such GPUs; default: what the service stores of their kind, "
        "else data sheets.",
    )
    top: int = Field(5, ge=1, le=100, description="How many ways to give.")
    explain: bool = Field(
        False,
        description="Find out which inputs, and which orders of ranks, would change the choice: a search for each.",
    )

    def machine(self, spec: JobSpec) -> Machine:
        """What the job would run on.

        Raises:
            ValueError: The profile is of another precision.
        """
        if self.cluster is not None:
            return machine_of(spec, self.profile, self.cluster.cluster())
        return Basis(profile=self.profile, node_gpus=self.node_gpus).machine(spec)


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
    provenance: Provenance = Field(description=PROVENANCE)
    context: PlannedContext | None = Field(
        None, description="Context parallelism of the first choice, as in its plan; null without."
    )
    why: tuple[str, ...] = Field(description="Deciding term, the next best, and the nearest that does not fit.")
    would_change: tuple[str, ...] = Field(description="Inputs that, changed by 20 %, would change the choice.")
    other_orders: tuple[str, ...] = Field(
        (), description="What other orders of ranks over the network would gain; gangs have none of them."
    )


def search_report(spec: JobSpec, asked: PlanSearch, fitted: Fitted | None = None) -> SearchReport:
    """Search and report.

    Args:
        spec: The job.
        asked: What for.
        fitted: What jobs took beside predictions by the profile that it has.

    Raises:
        ValueError: The profile is of another precision.
    """
    device, machine = device_bytes(spec.resources), replace(asked.machine(spec), fitted=fitted)
    limit = inf if device is None else device
    found = search(spec, asked.gpus, machine, limit, asked.top)
    first = found.choices[0] if found.choices else None
    return SearchReport(
        choices=tuple(_planned(choice, machine) for choice in found.choices),
        combinations=found.timed,
        device_memory_bytes=device,
        context=None if first is None else context_report(_leaving_modes(first.job), first.layout, machine),
        provenance=machine.provenance,
        why=tuple(reasons(found, limit)),
        would_change=tuple(sensitivities(spec, asked.gpus, machine, limit)) if asked.explain else (),
        other_orders=tuple(other_orders(spec, asked.gpus, machine, limit)) if asked.explain else (),
    )


def _leaving_modes(job: JobSpec) -> JobSpec:
    """The job with whatever recomputation each size needs, as the search chose it for the one that it found."""
    return job.model_copy(update={"parallelism": job.parallelism.model_copy(update={"recompute": "auto"})})


def _planned(choice: Choice, machine: Machine) -> PlannedChoice:
    training, seconds = choice.job.training, choice.seconds.total
    return PlannedChoice(
        text=str(choice),
        patch=choice.patch,
        world_size=choice.layout.world_size,
        memory_bytes=choice.needed,
        step_seconds=seconds,
        step_seconds_range=machine.range_of(choice.job, seconds),
        step_parts=StepParts(**asdict(choice.seconds)),
        tokens_per_second=training.global_batch_size * training.sequence_length / seconds,
    )
