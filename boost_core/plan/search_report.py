"""Report of a search, for people and programs."""

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
from boost_core.plan.measured import Basis, MeasuredProfile
from boost_core.plan.network import NetworkConfig
from boost_core.plan.report import StepParts
from boost_core.plan.search import Choice, other_orders, reasons, search, sensitivities


class PlanSearch(Config):
    """A search for the best ways to train a job."""

    gpus: int = Field(ge=1, le=65_536, description="Most GPUs to use.")
    cluster: NetworkConfig | None = Field(None, description="Network of the GPUs; default: nodes of node_gpus.")
    node_gpus: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="GPUs per node, if cluster is omitted; default: that of the nodes that the service sees and that "
        "suit the job, otherwise 8.",
    )
    node_memory_bytes: int | None = Field(
        None,
        ge=1,
        le=10**15,
        description="Memory of a node's host, if cluster is omitted; default: that of the nodes that the service sees "
        "and that suit the job, otherwise unknown and not checked.",
    )
    profile: MeasuredProfile | None = Field(
        None,
        description="Profile that `boost bench profile` measured of such GPUs; default: the one that the service "
        "stores for their kind, otherwise data sheets.",
    )
    top: int = Field(5, ge=1, le=100, description="Number of choices to return.")
    explain: bool = Field(
        False,
        description="Find out which inputs, and which orders of ranks, would change the choice: one search for each.",
    )

    def machine(self, spec: JobSpec) -> Machine:
        """Return the machine that the job would run on.

        Raises:
            ValueError: The profile is of another precision.
        """
        if self.cluster is not None:
            return self.cluster.machine(spec, self.profile)
        basis = Basis(profile=self.profile, node_gpus=self.node_gpus, node_memory_bytes=self.node_memory_bytes)
        return basis.machine(spec)


class PlannedChoice(Config):
    """One way to train the job."""

    text: str
    patch: dict[str, Any] = Field(description="JSON merge patch that turns the job into this choice.")
    world_size: int
    memory_bytes: int = Field(description="Device memory of the rank that needs most.")
    node_host_bytes: int = Field(
        0, description="The most host memory that a node's ranks need for their state and copies."
    )
    step_seconds: float
    step_seconds_range: tuple[float, float] = Field(description="Range expected to contain 80 % of step times.")
    step_parts: StepParts
    tokens_per_second: float


class SearchReport(Config):
    """The best ways to train a job on some GPUs."""

    choices: tuple[PlannedChoice, ...] = Field(description="The best choices, fastest first; empty if nothing fits.")
    combinations: int = Field(description="Number of combinations of sizes, micro-batches and schedules timed.")
    device_memory_bytes: int | None = Field(description="Memory of the requested GPU model; null if unknown.")
    node_memory_bytes: int | None = Field(
        None, description="Memory of a node's host; null if unknown, in which case it is not checked."
    )
    provenance: Provenance = Field(description=PROVENANCE)
    context: PlannedContext | None = Field(
        None, description="Context parallelism of the first choice, as in its plan; null without it."
    )
    why: tuple[str, ...] = Field(
        description="Reasons: the largest part of a step, the next best choice, and the nearest that does not fit."
    )
    would_change: tuple[str, ...] = Field(description="Inputs that, changed by 20 %, would change the choice.")
    other_orders: tuple[str, ...] = Field(
        (), description="What other orders of ranks over the network would gain; gangs do not support them."
    )


def search_report(spec: JobSpec, asked: PlanSearch, fitted: Fitted | None = None) -> SearchReport:
    """Search and report.

    Args:
        spec: The job.
        asked: What to search for.
        fitted: Corrections from jobs, for its profile.

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
        node_memory_bytes=machine.node_memory_bytes,
        # With ``recompute: auto``, each size gets what it needs, as in the search.
        context=first and context_report(first.job.with_parallelism(recompute="auto"), first.layout, machine),
        provenance=machine.provenance,
        why=tuple(reasons(found, limit, machine)),
        would_change=tuple(sensitivities(spec, asked.gpus, machine, limit)) if asked.explain else (),
        other_orders=tuple(other_orders(spec, asked.gpus, machine, limit)) if asked.explain else (),
    )


def _planned(choice: Choice, machine: Machine) -> PlannedChoice:
    training, seconds = choice.job.training, choice.seconds.total
    return PlannedChoice(
        text=str(choice),
        patch=choice.patch,
        world_size=choice.layout.world_size,
        memory_bytes=choice.needed,
        node_host_bytes=choice.host,
        step_seconds=seconds,
        step_seconds_range=machine.range_of(choice.job, seconds, choice.seconds.communication),
        step_parts=StepParts(**asdict(choice.seconds)),
        tokens_per_second=training.global_batch_size * training.sequence_length / seconds,
    )
