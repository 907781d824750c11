"""The machine that a job's workers run on, as far as the job specifies it: a device profile and a network."""

from dataclasses import dataclass, replace

from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.legality import flash_takes
from boost_core.hardware import ACCELERATOR_LABEL, LINKS, LOOPBACK, device_named
from boost_core.messages.reports import Provenance
from boost_core.plan.cluster import Cluster, Level
from boost_core.plan.fitted import Fitted, StepCorrection
from boost_core.plan.profile import Profile, of_cores, range_of

CPU = "CPU"  # as a kind of device
_MANY = 65_536  # more than any gang's nodes
NODE_GPUS = 8  # as on NVIDIA's HGX boards
_UNKNOWN_GPU = "A100"
_NODE_LINKS = {"A100": "nvlink-a100", "H100": "nvlink-h200", "H200": "nvlink-h200"}

LOCAL = Cluster((Level("node", _MANY, LOOPBACK),))


@dataclass(frozen=True)
class Machine:
    """What ranks run on.

    Attributes:
        profile: Profile of each rank's device.
        cluster: Network between the ranks.
        fitted: Corrections from jobs that ran on such machines; ``None`` if none has run.
        node_memory_bytes: Memory of each node's host; ``None`` if unknown.
    """

    profile: Profile
    cluster: Cluster
    fitted: Fitted | None = None
    node_memory_bytes: int | None = None

    @property
    def provenance(self) -> Provenance:
        """What predictions for this machine are based on."""
        if self.profile.measured:
            return "measured_fitted" if self.fitted else "measured"
        return "fitted" if self.fitted else "assumed"

    def correction(self, job: JobSpec) -> StepCorrection:
        """Return the correction of a job's predictions.

        Args:
            job: The job in its layout (``devices.at``).
        """
        if self.fitted is None:
            return StepCorrection(jobs=0, factor=1.0, spread=self.profile.spread)
        return self.fitted.of(job)

    def range_of(self, job: JobSpec, seconds: float, communication: float) -> tuple[float, float]:
        """Return the range expected to contain 80 % of a job's step times.

        It is the sum of both parts' ranges, as though both were slower or faster at once, so that telling them apart
        makes no range narrower.

        Args:
            job: The job in its layout, as in ``correction``.
            seconds: Predicted step time, with the correction.
            communication: Seconds of it that are exposed collectives (``StepSeconds.communication``).
        """
        correction = self.correction(job)
        low, high = range_of(seconds - communication, correction.spread)
        least, most = range_of(communication, correction.of_communication.spread)
        return low + least, high + most


def kind_of_gpu(resources: ResourcesConfig) -> str | None:
    """Return the kind of GPU that a job requests; ``None`` if any will do."""
    return resources.accelerator_type or resources.node_labels.get(ACCELERATOR_LABEL)


def kind_of_device(resources: ResourcesConfig) -> str | None:
    """Return the device kind whose jobs correct predictions: the GPU's, or ``CPU``; ``None`` if any GPU will do."""
    return kind_of_gpu(resources) if resources.gpus_per_worker else CPU


def required_labels(resources: ResourcesConfig) -> dict[str, str]:
    """Return the labels that a node must have for a job."""
    kind = resources.accelerator_type
    return dict(resources.node_labels) | ({ACCELERATOR_LABEL: kind} if kind else {})


def machine_for(resources: ResourcesConfig, precision: str) -> Machine:
    """Return the machine that a job's workers run on.

    An unknown or unspecified kind of GPU is treated as an A100: kinds differ less in how they rank layouts than a GPU
    does from a CPU. A node is assumed to have ``NODE_GPUS`` GPUs, each with its own network adapter.

    Args:
        resources: The job's resources.
        precision: Precision of its products.
    """
    if not resources.gpus_per_worker:
        return Machine(of_cores(resources.cpus_per_worker), LOCAL)
    asked = kind_of_gpu(resources)
    kind = asked if asked in _NODE_LINKS else _UNKNOWN_GPU
    device = device_named(kind)
    if device is None:
        raise AssertionError(f"hardware.DEVICES has no {kind}")
    nodes = Level("fabric", _MANY, LINKS["fabric-200g"])
    board = Level("node", NODE_GPUS, LINKS[_NODE_LINKS[kind]])
    return Machine(Profile.nominal(device, precision), Cluster((board, nodes)))


def with_nodes_of(machine: Machine, spec: JobSpec, gpus: int | None) -> Machine:
    """Return the machine with ``gpus`` GPUs per node, or unchanged if unknown or the job uses no GPUs."""
    if gpus is None or not spec.resources.gpus_per_worker:
        return machine
    node, *outer = machine.cluster.levels
    return replace(machine, cluster=Cluster((replace(node, fan_out=gpus), *outer)))


def captures_steps(job: JobSpec) -> bool:
    """Whether a job's steps are captured as CUDA graphs, as far as planning can tell; see ``train.step_graph``."""
    on_gpu, parallelism = job.resources.gpus_per_worker > 0, job.parallelism
    by_itself = parallelism.pipeline_parallel_size == parallelism.context_parallel_size == 1
    by_itself = by_itself and job.training.attention is None and not parallelism.keeps_on_host
    return on_gpu and by_itself and job.training.cuda_graphs != "off" and attends_on_device(job)


def attends_in_one(job: JobSpec) -> bool:
    """Whether each position sees everything before it in its sequence."""
    window = job.model.sliding_window
    return not job.data.documents_apart and (window is None or window >= job.training.sequence_length)


def attends_on_device(job: JobSpec) -> bool:
    """Whether attention on a GPU needs no document lengths on the host; see ``nn.documents``."""
    return attends_in_one(job) or flash_takes(job.model, job.training)
