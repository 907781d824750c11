"""Everything that a rank holds while it trains, and how it is saved and resumed."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.origin import Origin
from boost_core.checkpoint.shards import load_chunks, read_on_first_rank
from boost_core.checkpoint.snapshot_store import Fetch, load_from_memory
from boost_core.config import JobSpec
from boost_core.kernels import fp8_product
from boost_core.models.build import build
from boost_core.models.decoder import Decoder
from boost_core.models.stage import StageModule
from boost_core.nn.attention import Rotation
from boost_core.nn.weights import weight_specs
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.build import COMPUTE_TYPES, make_optimizer
from boost_core.optim.gradients import Gradients
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.clock import StepClock
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.parallel.mesh import ParallelMesh
from boost_core.parallel.process_groups import ProcessGroups
from boost_core.parallel.shard import WeightMaker, initialize_, make_weights, split_axes
from boost_core.parallel.symmetric_memory import connect
from boost_core.plan.snapshots import MemoryState
from boost_core.plan.stages import cut
from boost_core.plan.work import rank_tokens
from boost_core.train.dealing import Dealer
from boost_core.train.inputs import StepInputs
from boost_core.train.step_graph import StepGraph, obstacle

if TYPE_CHECKING:
    from boost_core.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)

_MASTER = ".master"  # suffix of the names of the weights' own chunks


@dataclass
class TrainState:
    """One rank's part of a job.

    Attributes:
        spec: The job.
        mesh: This rank's place in the gang.
        ledger: Counts this rank's collectives.
        clock: Times the parts of its steps.
        process_groups: The groups that this rank is in.
        model: This rank's part of the model.
        axes: The axis along which each weight is split over the tensor parallel ranks, if any.
        dealer: Says which tokens of a micro-batch this rank has, and how they attend.
        optimizer: Master weights and moments.
        gradients: Sums of a step's gradients.
        pipeline: This rank's stages; ``None`` without pipeline parallelism.
        end_of_document: The token that ends a document; ``None`` where documents see each other.
        inputs: A step's inputs from the host.
        graph: Runs a step's work on the device.
        step: Optimizer steps done.
        samples: Samples consumed, which is the data cursor.
        roomy: The cursor of a batch whose documents all ranks know to fit into a captured step, if there is one.
    """

    spec: JobSpec
    mesh: ParallelMesh
    ledger: CommunicationLedger
    clock: StepClock
    process_groups: ProcessGroups
    model: Decoder
    axes: dict[str, int | None]
    dealer: Dealer
    optimizer: MasterWeightAdamW
    gradients: Gradients
    pipeline: "Pipeline | None"
    end_of_document: int | None
    inputs: StepInputs
    graph: StepGraph
    step: int = 0
    samples: int = 0
    roomy: int | None = None

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
        stages = cut(spec.model, spec.parallelism, training.sequence_length)[
            groups.pipeline.rank :: groups.pipeline.size
        ]
        _use_symmetric_memory(spec, mesh, tensor)
        fp8 = _computes_in_fp8(training.precision, device, groups.gang)
        model, split = build(spec.model, spec.parallelism, tensor, stages, training.z_loss, fp8)
        make(model, split, tensor.rank, tensor.size, training.seed, device)
        axes = split_axes(model, split)
        rotation = Rotation.of(spec.model, training.sequence_length, device)
        optimizer = make_optimizer(spec, model, axes, tensor, groups.data)
        pipeline = None
        if groups.pipeline.size > 1:
            grouped = spec.parallelism.group_projections
            parts = [StageModule(model, spec.model, stage, grouped) for stage in stages]
            pipeline = _pipeline(spec, parts, model, groups.pipeline, mesh, ledger, clock)
        by_micro_batch = spec.parallelism.zero_stage == 2
        gradients = Gradients(dict(model.named_parameters()), optimizer.groups, groups.data, by_micro_batch)

        def abandon() -> None:
            gradients.abandon()
            model.strategy.abandon()

        def all_agree(yes: bool) -> bool:
            said = torch.tensor(float(yes), device=device)
            return bool(groups.gang.all_reduce_(said, "capture", dist.ReduceOp.MIN).item())

        inputs = StepInputs(training.global_batch_size // groups.replicas.size, training.sequence_length, device)
        required = training.cuda_graphs == "on"
        graph = StepGraph(obstacle(spec, device), required, clock, ledger, all_agree, abandon)
        end = end_of_document if spec.data.documents_apart else None
        dealer = Dealer(spec, rotation, groups, device, end)
        return cls(
            spec, mesh, ledger, clock, groups, model, axes, dealer, optimizer, gradients, pipeline, end, inputs, graph
        )

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
            list(threads.map(draw_one, self._masters()))
        self.optimizer.round_masters()

    def load(self, folder: CheckpointFolder, step: int) -> None:
        """Resume from a committed checkpoint of this job, whatever layout wrote it. All ranks call it.

        Raises:
            ValueError: The checkpoint is of another model, or lacks a moment that this optimizer keeps.
            CheckpointDamaged: A file is not what was written; on all ranks. The state is then unusable.
            OSError: It cannot be read; on all ranks.
        """
        manifest = read_on_first_rank(partial(folder.manifest, step))
        if different := manifest.differences(self.spec.model):
            raise ValueError(
                f"the checkpoint at {folder.step_url(step)} is of another model: {', '.join(different.values())}; "
                "use the same model, or another checkpoint folder"
            )
        self._continue_from(folder, manifest)

    def load_origin(self, origin: Origin, step: int) -> None:
        """Start from a committed checkpoint of another job, as this job says. All ranks call it.

        Any other data or layout, and any optimizer that needs no further moments, continues from its weights, moments,
        step and data cursor. Its weights alone are a start for any optimizer.

        Raises:
            ValueError: The job cannot start from it (``UnfitOrigin``), or it lacks a moment that this optimizer keeps.
            CheckpointDamaged: A file is not what was written; on all ranks. The state is then unusable.
            OSError: It cannot be read; on all ranks.
        """
        manifest = read_on_first_rank(partial(origin.folder.manifest, step))
        origin.refuse_unfit(self.spec, manifest)
        if origin.weights_only:
            load_chunks(origin.folder, manifest, self._masters())
            self.optimizer.round_masters()
        else:
            self._continue_from(origin.folder, manifest)

    def _continue_from(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        load_chunks(folder, manifest, self.chunks())
        self.optimizer.round_masters()
        self.step, self.samples = manifest.step, manifest.samples

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
        return [
            Chunk.of_shard(
                f"{piece.name}.{piece.quantity}", piece.shape, piece.offsets, piece.tensor, self.axes[piece.name],
                self.process_groups.tensor.rank, self.process_groups.tensor.size,
            )
            for piece in self.optimizer.pieces()
        ]  # fmt: skip

    def _masters(self) -> list[Chunk]:
        """Return what this rank keeps of the weights themselves."""
        return [chunk for chunk in self.chunks() if chunk.name.endswith(_MASTER)]

    def manifest_writer(self, folder: CheckpointFolder) -> Callable[[dict[str, int]], Manifest]:
        """Return what commits a checkpoint of the present step, even later, given the files' checksums."""
        return partial(folder.commit_written, self.spec, self.spec.parallelism, self.step, self.samples)


def _computes_in_fp8(precision: str, device: torch.device, gang: Communicator) -> bool:
    """Return whether products are in 8 bits, the same on all ranks; warns if the job asks for them in vain."""
    if precision != "fp8":
        return False
    reason = fp8_product.unavailable(device)
    everywhere = torch.tensor(float(reason is None), device=device)
    if gang.all_reduce_(everywhere, "fp8", dist.ReduceOp.MIN).item():
        return True
    if gang.rank == 0:
        why = reason or "another rank's device has none"
        logger.warning("training.precision is fp8, and %s: products are in bf16", why)
    return False


def _use_symmetric_memory(spec: JobSpec, mesh: ParallelMesh, tensor: Communicator) -> None:
    """Let a tensor parallel group exchange through symmetric memory as the job says; warns if it cannot."""
    limits = spec.parallelism.symmetric_memory
    if limits is None or tensor.size == 1:
        return
    symmetric, why = connect(limits, mesh.group("tp"), mesh.device)
    if symmetric is not None:
        tensor.use(symmetric)
    elif tensor.rank == 0:
        logger.warning("parallelism.symmetric_memory is set, and %s: all-reduces are done without it", why)


def _pipeline(
    spec: JobSpec, parts: list[StageModule], model: Decoder, ranks: Communicator, mesh: ParallelMesh,
    ledger: CommunicationLedger, clock: StepClock,
) -> "Pipeline":  # fmt: skip
    # This imports torch's compiler: a second of every process's start, and so of a recovery, that most jobs can save.
    from boost_core.parallel.pipeline import Pipeline

    training, parallelism = spec.training, spec.parallelism
    put_off = None
    if parallelism.pipeline_schedule == "zero_bubble":  # legal with no other strategy
        put_off = cast(BottleneckTensorParallel, model.strategy).defer_weight_gradients()
    return Pipeline(
        parts, parallelism.stages, parallelism.pipeline_schedule,
        training.micro_batches(parallelism.data_parallel_size),
        rank_tokens(spec), ranks, mesh.group("pp"), ledger,
        clock, put_off, COMPUTE_TYPES[training.precision], mesh.device,
    )  # fmt: skip
