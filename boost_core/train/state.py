"""Everything that a rank holds while it trains, and how it is saved and resumed."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.nn.attention import SDPBackend, sdpa_kernel

from boost_core.architecture import cut
from boost_core.checkpoint.folder import CheckpointFolder, Origin
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.peer_memory import Fetch, SnapshotStore, load_from_memory
from boost_core.checkpoint.resharding import load_chunks
from boost_core.checkpoint.shards import Chunk, read_on_first_rank
from boost_core.config import JobSpec
from boost_core.config.job import rank_tokens
from boost_core.data.corpus import Sequences
from boost_core.kernels import fp8_product
from boost_core.messages import Steer
from boost_core.model.attention import Rotation, backends
from boost_core.model.decoder import Decoder, StageModule, build
from boost_core.model.low_rank import weight_specs
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.build import COMPUTE_TYPES, make_optimizer
from boost_core.optim.zero import Gradients
from boost_core.parallel.communicator import CommunicationLedger, Communicator, StepClock, StepParts, Totals
from boost_core.parallel.mesh import ParallelMesh, ProcessGroups
from boost_core.parallel.shard import WeightMaker, initialize_, make_weights
from boost_core.parallel.symmetric_memory import abort_all, connect
from boost_core.plan.machine import attends_in_one, attends_on_device
from boost_core.plan.snapshots import MemoryState, SnapshotKey
from boost_core.train.batch import Partitioner
from boost_core.train.step_graph import StepGraph, obstacle

if TYPE_CHECKING:
    from boost_core.parallel.pipeline import Pipeline


logger = logging.getLogger(__name__)

# A step's inputs from the host, at addresses that stay the same from step to step.
#
# Shape suffixes: b sequences, t = s + 1 tokens of each.


class StepInputs:
    """A step's sequences, and what this rank tells all others.

    The host writes the next step's inputs only after it has read this step's values, and so never overwrites what is
    still being copied.

    Args:
        sequences: Maximum number of sequences per step on this replica.
        length: Tokens per sequence.
        device: Where they are read.

    Attributes:
        sequences: Those written last, on the host; there may be room for more.
        token_bt: Each sequence with the token that follows it.
        loss_limit: The loss above which the step has diverged, one float64 element.
        notices: What this rank tells all others, one float64 element each, 0 or 1: to halt, to store before that, to
            postpone a copy of the state, that it has the next change of values, and that its next batch has more
            documents than a captured step has room for.
    """

    def __init__(self, sequences: int, length: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        tokens = torch.zeros(sequences, length + 1, dtype=torch.int64, pin_memory=pinned)
        self._on_host = [tokens, torch.zeros(6, dtype=torch.float64, pin_memory=pinned)]
        self._written = [tensor.numpy() for tensor in self._on_host]
        self.sequences: Sequences = self._written[0]
        # On CPU these are the same tensors.
        self._read = [tensor.to(device) for tensor in self._on_host]
        self.token_bt, words = self._read
        self.loss_limit, *self.notices = words.unbind()

    def write(self, sequences: Sequences, loss_limit: float, notices: tuple[bool, bool, bool, bool, bool]) -> None:
        """Write the next step's inputs, ``[b, t]`` tokens first; b may be smaller than the room."""
        tokens, words = self._written
        tokens[: len(sequences)] = sequences
        words[:] = loss_limit, *notices
        for there, here in zip(self._read, self._on_host, strict=True):
            if there is not here:
                there.copy_(here, non_blocking=True)


def attention_backend(spec: JobSpec, device: torch.device) -> str:
    """Return whose kernels compute a job's attention, for records: ``cudnn``, ``flash``, ``efficient`` or ``math``."""
    model, ranks, length = spec.model, spec.parallelism.tensor_parallel_size, spec.training.sequence_length
    dense = spec.parallelism.context_parallel_size == 1 and spec.training.attention is None and attends_in_one(spec)
    if not dense and device.type == "cuda" and attends_on_device(spec):
        return "flash"
    empty = partial(torch.empty, dtype=COMPUTE_TYPES[spec.training.precision], device=device, requires_grad=True)
    both = model.num_attention_heads, model.key_value_heads
    query, key = (empty(1, heads // ranks, length, model.head_size) for heads in both)
    with sdpa_kernel(backends(device), set_priority=True):
        chosen = SDPBackend(torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True))
    return chosen.name.removesuffix("_ATTENTION").lower()


_MASTER = ".master"  # suffix of the names of the weights' own chunks


@dataclass
class TrainState:
    """One rank's part of a job.

    Attributes:
        spec: The job, with the values that hold now.
        mesh: This rank's place in the gang.
        ledger: Counts this rank's collectives.
        clock: Times the parts of its steps.
        process_groups: The groups that this rank is in.
        model: This rank's part of the model.
        axes: The axis along which each weight is split over the tensor parallel ranks, if any.
        partitioner: Says which tokens of a micro-batch this rank has, and how they attend.
        optimizer: Master weights and moments.
        gradients: Sums of a step's gradients.
        pipeline: This rank's stages; ``None`` without pipeline parallelism.
        end_of_document: The token that ends a document; ``None`` where documents see each other.
        inputs: A step's inputs from the host.
        graph: Runs a step's work on the device.
        step: Optimizer steps done.
        samples: Samples consumed, which is the data cursor.
        fits_captured_step: The cursor of a batch whose documents all ranks know to fit into a captured step, if there
            is one.
    """

    spec: JobSpec
    mesh: ParallelMesh
    ledger: CommunicationLedger
    clock: StepClock
    process_groups: ProcessGroups
    model: Decoder
    axes: dict[str, int | None]
    partitioner: Partitioner
    optimizer: MasterWeightAdamW
    gradients: Gradients
    pipeline: "Pipeline | None"
    end_of_document: int | None
    inputs: StepInputs
    graph: StepGraph
    step: int = 0
    samples: int = 0
    fits_captured_step: int | None = None

    @classmethod
    def initial(
        cls, spec: JobSpec, device: torch.device, make: WeightMaker = make_weights, end_of_document: int = 0,
        communicator: type[Communicator] = Communicator,
    ) -> "TrainState":  # fmt: skip
        """Return the state before the first step.

        Args:
            spec: The job.
            device: Where this rank computes.
            end_of_document: The token that ends a document, which matters where documents are apart.
            make: Gives the declared weights their first values; by default they depend on the job's seed alone.
            communicator: Class that runs the collectives.
        """
        mesh = ParallelMesh.build(spec.parallelism, device)
        ledger = CommunicationLedger()
        clock = StepClock(ledger, device)
        groups = ProcessGroups.of(mesh, spec.model.tie_embeddings, ledger, communicator)
        training, tensor = spec.training, groups.tensor
        every_stage = cut(spec.model, spec.parallelism, training.sequence_length)
        stages = every_stage[groups.pipeline.rank :: groups.pipeline.size]

        limits = spec.parallelism.symmetric_memory
        if limits is not None and tensor.size > 1:
            tensor.symmetric, why = connect(limits, mesh.mesh.get_group("tp"), mesh.device)
            if tensor.symmetric is None and tensor.rank == 0:
                logger.warning("parallelism.symmetric_memory is set, and %s: all-reduces are done without it", why)

        fp8 = training.precision == "fp8"  # the same on all ranks
        if fp8:
            reason = fp8_product.unavailable(device)
            everywhere = torch.tensor(float(reason is None), device=device)
            fp8 = bool(groups.gang.all_reduce_(everywhere, "fp8", dist.ReduceOp.MIN).item())
            if not fp8 and groups.gang.rank == 0:
                why = reason or "another rank's device has none"
                logger.warning("training.precision is fp8, and %s: products are in bf16", why)

        model, split = build(spec.model, spec.parallelism, tensor, stages, training.z_loss, fp8)
        make(model, split, tensor.rank, tensor.size, training.seed, device)
        axes = {name: split[spec.role] for name, spec in weight_specs(model).items()}
        rotation = Rotation.of(spec.model, training.sequence_length, device)
        optimizer = make_optimizer(spec, model, tensor, groups.data)

        pipeline, deferred = None, model.strategy.deferred
        if groups.pipeline.size > 1:
            # This imports torch's compiler: a second of every process's start, and so of a recovery, that most jobs can
            # save.
            from boost_core.parallel.pipeline import Pipeline

            parallelism = spec.parallelism
            deferred.put_off = parallelism.pipeline_schedule == "zero_bubble"
            pipeline = Pipeline(
                [StageModule(model, spec.model, stage, parallelism.group_projections) for stage in stages],
                parallelism.stages, parallelism.pipeline_schedule,
                training.micro_batches(parallelism.data_parallel_size),
                rank_tokens(spec), groups.pipeline, mesh.mesh.get_group("pp"), ledger,
                clock, deferred.take if deferred.put_off else None, COMPUTE_TYPES[training.precision], mesh.device,
            )  # fmt: skip

        weights, by_micro_batch = dict(model.named_parameters()), spec.parallelism.zero_stage == 2
        gradients = Gradients(weights, optimizer.groups, groups.data, by_micro_batch, deferred.sinks)

        inputs = StepInputs(training.global_batch_size // groups.replicas.size, training.sequence_length, device)
        minimum = partial(groups.gang.all_reduce_, purpose="capture", operation=dist.ReduceOp.MIN)
        graph = StepGraph(
            obstacle(spec, device), training.cuda_graphs == "on", clock, ledger,
            lambda yes: bool(minimum(torch.tensor(float(yes), device=device)).item()),
            lambda: gradients.abandon(deferred.waiting),
        )  # fmt: skip
        end = end_of_document if spec.data.documents_apart else None
        partitioner = Partitioner(spec, rotation, groups, device, end)
        return cls(
            spec, mesh, ledger, clock, groups, model, axes, partitioner, optimizer, gradients, pipeline, end, inputs,
            graph,
        )  # fmt: skip

    def draw(self) -> None:
        """Draw the initial weights, which depend on the job's seed alone.

        A rank draws what it keeps of their masters, where it computes: on a GPU, or on as many of the host's cores as
        torch may use.
        """
        specs, seed, device = weight_specs(self.model), self.spec.training.seed, self.mesh.device

        def draw_one(master: Chunk) -> None:
            name = master.name.removesuffix(_MASTER)
            here = master.tensor.device.type == device.type
            drawn = master.tensor if here else torch.empty_like(master.tensor, device=device)
            initialize_(drawn, master.offsets, name, specs[name], seed)
            if not here:  # drawn for the host, which may round differently from a GPU
                master.tensor.copy_(drawn)

        at_once = torch.get_num_threads() if self.mesh.device.type == "cpu" else 1
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(draw_one, (chunk for chunk in self.chunks() if chunk.name.endswith(_MASTER))))
        self.optimizer.round_masters()

    def load(self, folder: CheckpointFolder, step: int, origin: Origin | None = None) -> None:
        """Continue from a committed checkpoint, whatever layout wrote it. All ranks call it.

        One of another job may have any other data, and any optimizer that needs no further moments. Its weights alone
        are a start for any optimizer.

        Args:
            folder: The folder.
            step: The checkpoint's step.
            origin: What this job says of the other job whose checkpoint it is; ``None`` for one of its own.

        Raises:
            ValueError: The checkpoint is of another model, the job cannot start from it (``UnfitOrigin``), or it lacks
                a moment that this optimizer keeps.
            CheckpointDamaged: A file is not what was written; on all ranks. The state is then unusable.
            OSError: It cannot be read; on all ranks.
        """
        manifest = read_on_first_rank(partial(folder.manifest, step))
        if origin is not None:
            origin.refuse_unfit(self.spec, manifest)
        elif different := manifest.differences(self.spec.model):
            raise ValueError(
                f"the checkpoint at {folder.step_url(step)} is of another model: {', '.join(different.values())}; "
                "use the same model, or another checkpoint folder"
            )
        elif manifest.sequence_length != (length := self.spec.training.sequence_length):
            raise ValueError(
                f"the checkpoint at {folder.step_url(step)} counts sequences of {manifest.sequence_length} tokens, and "
                f"training.sequence_length is {length}; use another checkpoint folder, with checkpoint.continue_from"
            )
        weights_only = origin is not None and origin.weights_only
        chunks = (each for each in self.chunks() if not weights_only or each.name.endswith(_MASTER))
        load_chunks(folder, manifest, chunks)
        self.optimizer.round_masters()
        if not weights_only:
            self.step, self.samples = manifest.step, manifest.samples
        if origin is None and len(manifest.job.get("steered", ())) > len(self.spec.steered):
            # The gang that wrote it was steered and lost, before the job's record had that.
            there = JobSpec.model_validate(manifest.job)
            self.spec = self.spec.with_steering(there.steering).model_copy(update={"steered": there.steered})

    def load_from_memory(self, memory: MemoryState[Any], fetch: Fetch) -> None:
        """Continue from a state in the memory of processes, whatever layout made it. All ranks call it.

        Raises:
            StateLost: A part of it is no longer where it was; on all ranks.
        """
        load_from_memory(memory, fetch, self.chunks())
        self.optimizer.round_masters()
        self.step, self.samples = memory.step, memory.samples

    def chunks(self) -> list[Chunk]:
        """Return what this rank keeps, as parts of whole tensors: a checkpoint does not depend on the layout."""
        axes, rank, size = self.axes, self.process_groups.tensor.rank, self.process_groups.tensor.size
        return [
            Chunk.of_shard(f"{its.name}.{its.quantity}", its.shape, its.offsets, its.tensor, axes[its.name], rank, size)
            for its in self.optimizer.pieces()
        ]

    def manifest_writer(self, folder: CheckpointFolder) -> Callable[[dict[str, int]], Manifest]:
        """Return what commits a checkpoint of the present step, even later, given the files' checksums."""
        return partial(folder.commit_written, self.spec, self.spec.parallelism, self.step, self.samples)


# What a rank of an elastic gang is given besides its job, and the outcome of its training.


class Outcome(StrEnum):
    """How a rank's training ended, if it did not fail."""

    FINISHED = "FINISHED"  # the job's last step is done
    HALTED = "HALTED"  # as requested; the state is in the memory of all ranks
    STORED = "STORED"  # the same, and also in the checkpoint folder


@dataclass(frozen=True)
class StepTimes:
    """A step as one rank saw it.

    Attributes:
        step: Steps done, this one included.
        seconds: Its duration, from the end of the previous step.
        busy_seconds: The part not spent waiting for other ranks.
        parts: The step itself, part by part, without what happened between it and the previous one.
        communication: Its collectives by kind and group, for example ``("all_reduce", "tp")``.
    """

    step: int
    seconds: float
    busy_seconds: float
    parts: StepParts
    communication: Mapping[tuple[str, str], Totals]


def _nowhere(_owner: Any, key: SnapshotKey, _regions: Any) -> Any:
    raise LookupError(f"{key} cannot be fetched from anywhere")


@dataclass
class Membership:
    """A rank's place in an elastic gang; the defaults are for a rank without one.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        snapshots: This process's snapshots, which outlive the gang.
        owner_of: Which rank keeps the copy of each rank's snapshots; empty to make none.
        recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
        fetch: Gets parts of a snapshot from its owner.
        halt: Set to stop after a step; all ranks then stop after the same one.
        store: Set before ``halt`` to also have a checkpoint written then.
        aborted: Set before collectives are aborted: from then on their results are invalid.
        after_step: Called with each step on every rank, before the next.
        before_copy: Called before a copy of the state is kept anywhere; from a thread.
        after_copy: Called with each step whose state is held twice for every rank; from a thread.
        before_save: Called before a checkpoint is written; an exception counts as the store's refusal.
        goes_on: Called repeatedly during long work between steps, so that it is not taken for a hang: by the first rank
            during evaluation and sampling, and by each rank that waits for a checkpoint. Its argument is the store's
            error while the last checkpoint cannot be written, and otherwise empty.
        waited_seconds: How long previous gangs have waited for the store to take the last checkpoint.
        steers: Changes of values to make, by number. Each is made once all ranks have it.
    """

    generation: int = 1
    snapshots: SnapshotStore = field(default_factory=SnapshotStore)
    owner_of: Sequence[int] = ()
    recovery: MemoryState[Any] | None = None
    fetch: Fetch = _nowhere
    halt: threading.Event = field(default_factory=threading.Event)
    store: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)
    after_step: Callable[[StepTimes], None] = lambda _: None
    before_copy: Callable[[], None] = lambda: None
    after_copy: Callable[[int], None] = lambda _: None
    before_save: Callable[[], None] = lambda: None
    goes_on: Callable[[str], None] = lambda _: None
    waited_seconds: float = 0.0
    steers: dict[int, Steer] = field(default_factory=dict)

    def abort(self) -> None:
        """End the kernels that wait for a rank that is gone. NCCL's collectives are left for the caller to abort."""
        self.aborted.set()
        abort_all()

    def refuse_aborted(self) -> None:
        """Check values that collectives contributed to, before they are used.

        NCCL's collectives end early when they are aborted, and nothing in their results says so.

        Raises:
            DistError: They have been aborted.
        """
        if self.aborted.is_set():
            raise DistError("its collectives were aborted, because another rank is gone")
