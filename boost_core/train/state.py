"""Everything that a rank holds while it trains, and how it is saved and resumed."""

from dataclasses import dataclass

import torch

from boost_core.checkpoint.folder import CheckpointFolder, Manifest
from boost_core.checkpoint.shards import load_shards, on_first_rank, save_shards
from boost_core.config import JobSpec
from boost_core.models.build import build
from boost_core.models.decoder import Decoder
from boost_core.nn.attention import Rotation
from boost_core.nn.weights import norm_weights
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.loro import Loro, factor_pairs
from boost_core.parallel.collectives import Collectives
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.parallel.mesh import ParallelMesh
from boost_core.parallel.shard import WeightMaker, latent_weights, make_weights, split_axes

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class TrainState:
    """One rank's part of a job.

    Attributes:
        spec: The job.
        mesh: This rank's place in the gang.
        ledger: Counts this rank's collectives.
        tensor_parallel: Collectives over the tensor parallel group.
        data_parallel: Collectives over the data parallel group.
        model: The model with this rank's shards.
        axes: The axis that each weight is split along over the tensor parallel ranks, if it is.
        latent_weights: Names of the weights that work on whole latents.
        rotation: The rotary embedding for the job's sequence length.
        optimizer: Master weights and moments.
        counted_blocks: Which blocks of the flat gradients this rank counts in their global norm.
        step: Optimizer steps done.
        samples: Samples consumed, which is the data cursor.
    """

    spec: JobSpec
    mesh: ParallelMesh
    ledger: CommunicationLedger
    tensor_parallel: Collectives
    data_parallel: Collectives
    model: Decoder
    axes: dict[str, int | None]
    latent_weights: list[str]
    rotation: Rotation
    optimizer: MasterWeightAdamW
    counted_blocks: torch.Tensor
    step: int = 0
    samples: int = 0

    @classmethod
    def initial(cls, spec: JobSpec, device: torch.device, make: WeightMaker = make_weights) -> "TrainState":
        """The state before the first step.

        Args:
            spec: The job.
            device: Where this rank computes.
            make: Gives the declared weights their first values; the usual ones depend on the job's seed alone.
        """
        mesh = ParallelMesh.build(spec.parallelism, device)
        ledger = CommunicationLedger()
        tensor_parallel = Collectives(mesh.group("tp"), "tp", ledger)
        model, axes = build(spec.model, spec.parallelism, tensor_parallel)
        make(model, axes, tensor_parallel.rank, tensor_parallel.size, spec.training.seed, device)
        split = split_axes(model, axes)
        optimizer = _optimizer(spec, model, tensor_parallel)
        # What every rank has whole counts on the first.
        counted = {name for name, axis in split.items() if axis is not None or tensor_parallel.rank == 0}
        return cls(
            spec=spec,
            mesh=mesh,
            ledger=ledger,
            tensor_parallel=tensor_parallel,
            data_parallel=Collectives(mesh.group("dp"), "dp", ledger),
            model=model,
            axes=split,
            latent_weights=latent_weights(model),
            rotation=Rotation(spec.training.sequence_length, spec.model.head_size, spec.model.rope_theta, device),
            optimizer=optimizer,
            counted_blocks=optimizer.gradient_blocks(counted),
        )

    def save(self, folder: CheckpointFolder) -> Manifest:
        """Write and commit a checkpoint of this step. All ranks call it; it returns once it is committed.

        Raises:
            SaveFailed: On all ranks; nothing is committed.
        """
        checksums = save_shards(folder, self.step, self.optimizer.tensors(), self.axes, self.mesh.mesh)
        return on_first_rank(
            lambda: folder.commit_written(self.spec, self.spec.parallelism, self.step, self.samples, checksums)
        )

    def load(self, folder: CheckpointFolder, step: int) -> None:
        """Continue from a committed checkpoint. All ranks call it.

        Raises:
            ValueError: The checkpoint is of a model of another shape.
        """
        manifest = folder.manifest(step)
        _refuse_other_model(manifest, self.spec, folder.step_url(step))
        load_shards(folder, step, self.optimizer.tensors(), self.axes, self.mesh.mesh)
        self.optimizer.copy_masters_to_weights()
        self.step, self.samples = manifest.step, manifest.samples


def _optimizer(spec: JobSpec, model: Decoder, tensor_parallel: Collectives) -> MasterWeightAdamW:
    weights, config = dict(model.named_parameters()), spec.optimizer
    compute_type, undecayed = COMPUTE_TYPES[spec.training.precision], norm_weights(model)
    if config.loro is None:
        return MasterWeightAdamW(weights, config, compute_type, undecayed)
    rank_share = spec.model.bottleneck_rank / spec.model.hidden_size
    return Loro(weights, config, config.loro, compute_type, undecayed, factor_pairs(model), rank_share, tensor_parallel)


def _refuse_other_model(manifest: Manifest, spec: JobSpec, url: str) -> None:
    saved, asked = manifest.job.model.model_dump(exclude={"preset"}), spec.model.model_dump(exclude={"preset"})
    different = [
        f"{name} is {saved[name]} there and {asked[name]} here" for name in asked if saved[name] != asked[name]
    ]
    if different:
        raise ValueError(
            f"the checkpoint at {url} is of another model: {', '.join(different)}; "
            "use the same model, or another checkpoint folder"
        )
