"""What a gang is told of its surroundings. Plain data, because its processes cannot see the service's settings."""

from dataclasses import dataclass

from service.gang.status import JobTag
from service.logs import GangLogs
from service.security.secrets import SecretReference


@dataclass(frozen=True)
class GangContext:
    """The same for all processes of a gang.

    Attributes:
        tag: The job, for people who look at Ray.
        secret: What the ranks reach data and checkpoints with; ``None`` for their nodes' own means.
        metrics_ports: Each rank serves its metrics on the first of these that is free; none: not at all.
        logs: How the processes write their logs.
    """

    tag: JobTag
    secret: SecretReference | None
    metrics_ports: range
    logs: GangLogs
