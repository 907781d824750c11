"""What a job will need and about how long it will take, at every shape that it allows: before any of it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.elasticity import Shape
from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.model import ModelConfig
from boost_core.config.presets import PRESETS
from boost_core.plan.communication import block_backward, block_forward
from boost_core.plan.flops import model_flops_per_token
from boost_core.plan.memory import ELEMENT_BYTES, rank_memory
from boost_core.plan.parameters import parameter_count
from boost_core.plan.resize import fastest
from boost_core.plan.throughput import step_seconds

MOST_SHAPES = 64

# Gigabytes as NVIDIA's data sheets have them. Drivers report some 6 % more, which is left for what the plan of a rank's
# memory leaves out: CUDA's context, NCCL's buffers, the allocator's gaps.
DEVICE_BYTES = {
    "A100": 80_000_000_000,
    "A100-40G": 40_000_000_000,
    "A100-80G": 80_000_000_000,
    "H100": 80_000_000_000,
    "H200": 141_000_000_000,
}

_PRESET_VOCABULARY = 32_000  # the CoLA paper's, so that counts are comparable with it
_FAMILIES = ("dense", "svd", "cola", "lax")


class Memory(Config):
    """Bytes of the rank that needs most."""

    weights: int = Field(description="What the model computes with.")
    gradients: int = Field(description="Sums of gradients, fp32.")
    optimizer: int = Field(description="Masters, moments and rounded copies.")
    activations: int = Field(description="Kept for the backward pass, and what that takes in a block.")
    logits: int = Field(description="What head and loss take.")
    total: int = Field(description="The most at any moment; not all of the above is there at once.")


class Communication(Config):
    """Tensor parallel all-reduces of one micro-batch through all blocks, forward and backward."""

    all_reduces: int
    elements_per_token: int = Field(description="Elements of their payloads on a rank.")


class PlannedShape(Config):
    """The job at one shape."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    world_size: int
    memory: Memory
    device_memory_bytes: int | None = Field(description="Of the kind of GPU asked for; none for CPUs and other kinds.")
    fits_device: bool | None = Field(description="Whether memory.total is within it; none where it is not known.")
    step_seconds: float = Field(description="Predicted, to rank shapes.")
    tokens_per_second: float
    total_seconds: float = Field(description="Of all steps.")
    communication: Communication


class Plan(Config):
    """What a job will need."""

    parameters: int
    trainable_bytes_per_parameter: int = Field(
        description="Weights, gradients and optimizer state of one parameter, where replicas share none of it."
    )
    flops_per_token: int = Field(description="Forward and backward, without recomputation.")
    tokens_per_step: int
    shapes: tuple[PlannedShape, ...] = Field(description="Shapes that the gang may take, the fewest ranks first.")
    fastest: int | None = Field(
        description="Which shape has the highest predicted throughput of those that fit; none if none does."
    )
    notes: tuple[str, ...] = Field(description="For people.")


class Preset(Config):
    """A published shape."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rank: int
    vocab_size: int = Field(description="What the parameters are counted with; a preset itself has none.")
    parameters: dict[str, int] = Field(description="Their number by family.")


class PresetList(Config):
    """All presets, from the smallest to the largest."""

    presets: tuple[Preset, ...]


def plan(spec: JobSpec) -> Plan:
    """What a job will need at each of its shapes.

    Of more than ``MOST_SHAPES`` shapes, the job's own and those of the highest predicted throughput are given.
    """
    legal = spec.shapes()
    seconds = {shape: step_seconds(spec, shape) for shape in legal}
    shapes = _chosen(spec, seconds)
    planned = tuple(_planned(spec, shape, seconds[shape]) for shape in shapes)
    fitting = [shape for shape, each in zip(shapes, planned, strict=True) if each.fits_device is not False]
    best = fastest(spec, fitting)
    bytes_an_element = ELEMENT_BYTES[spec.training.precision]
    # A master and two moments, and gradients, in fp32; the weights are apart from the masters if they are rounded.
    bytes_a_parameter = 16 if bytes_an_element == ELEMENT_BYTES["fp32"] else 16 + bytes_an_element
    return Plan(
        parameters=parameter_count(spec.model),
        trainable_bytes_per_parameter=bytes_a_parameter,
        flops_per_token=model_flops_per_token(spec.model, spec.training.sequence_length),
        tokens_per_step=_tokens_per_step(spec),
        shapes=planned,
        fastest=None if best is None else shapes.index(best),
        notes=tuple(_notes(spec, planned, len(legal) - len(shapes))),
    )


def presets() -> PresetList:
    """All presets and how many parameters each has in each family."""
    return PresetList(presets=tuple(sorted(map(_preset, PRESETS), key=lambda preset: preset.parameters["dense"])))


def device_bytes(resources: ResourcesConfig) -> int | None:
    """Memory of the GPU that a job asks for; ``None`` if it asks for none, or for a kind that is not known."""
    if not resources.gpus_per_worker or resources.accelerator_type is None:
        return None
    return DEVICE_BYTES.get(resources.accelerator_type)


def _chosen(spec: JobSpec, seconds: Mapping[Shape, float]) -> list[Shape]:
    """The shapes to give, in the job's order."""
    own = Shape.of(spec.parallelism)
    quickest = sorted(seconds, key=lambda shape: (shape != own, seconds[shape]))[:MOST_SHAPES]
    return [shape for shape in seconds if shape in quickest]


def _planned(spec: JobSpec, shape: Shape, seconds: float) -> PlannedShape:
    memory, device = rank_memory(spec, shape), device_bytes(spec.resources)
    return PlannedShape(
        tensor_parallel_size=shape.tensor,
        pipeline_parallel_size=shape.pipeline,
        data_parallel_size=shape.data,
        world_size=shape.world_size,
        memory=Memory(**asdict(memory)),
        device_memory_bytes=device,
        fits_device=None if device is None else memory.total <= device,
        step_seconds=seconds,
        tokens_per_second=_tokens_per_step(spec) / seconds,
        total_seconds=seconds * spec.training.steps,
        communication=_communication(spec, shape),
    )


def _communication(spec: JobSpec, shape: Shape) -> Communication:
    parallelism = spec.at(shape).parallelism
    if shape.tensor == 1:
        return Communication(all_reduces=0, elements_per_token=0)
    forward, backward = block_forward(spec.model, parallelism), block_backward(spec.model, parallelism)
    sent = [forward, backward, *([forward] if parallelism.recompute == "full" else [])]
    blocks = spec.model.num_hidden_layers
    return Communication(
        all_reduces=blocks * sum(part.all_reduces for part in sent),
        elements_per_token=blocks * sum(part.elements + part.statistic_elements for part in sent),
    )


def _tokens_per_step(spec: JobSpec) -> int:
    return spec.training.global_batch_size * spec.training.sequence_length


def _notes(spec: JobSpec, planned: Sequence[PlannedShape], left_out: int) -> list[str]:
    notes = ["seconds are predictions that are meant to rank shapes; how long a step really takes, its report says"]
    if left_out:
        notes.append(f"{left_out} more shapes are legal; these are the job's own and those predicted to be fastest")
    if not spec.resources.gpus_per_worker:
        return notes
    if device_bytes(spec.resources) is None:
        kind = spec.resources.accelerator_type
        named = "no kind of GPU is named" if kind is None else f"how much memory a {kind} has is not known here"
        return [*notes, f"{named}; set resources.accelerator_type to one of {', '.join(DEVICE_BYTES)} to see what fits"]
    too_large = [shape for shape in planned if not shape.fits_device]
    if len(too_large) == len(planned):
        notes.append(_nothing_fits(spec, planned))
    elif too_large:
        notes.append(f"{len(too_large)} of {len(planned)} shapes need more memory than a GPU has")
    return notes


def _nothing_fits(spec: JobSpec, planned: Sequence[PlannedShape]) -> str:
    least = min(planned, key=lambda shape: shape.memory.total)
    needed, there = least.memory.total / 1e9, (least.device_memory_bytes or 0) / 1e9
    shape = Shape(least.tensor_parallel_size, least.pipeline_parallel_size, least.data_parallel_size)
    return f"no shape fits: {shape} needs least, {needed:.1f} GB of {there:g} GB; {', '.join(_remedies(spec, shape))}"


def _remedies(spec: JobSpec, shape: Shape) -> list[str]:
    """What would need less memory, and is not done yet."""
    parallelism, training = spec.parallelism, spec.training
    remedies = ["raise parallelism.tensor_parallel_size or pipeline_parallel_size"]
    if training.micro_batch_size > 1:
        remedies.append(f"lower training.micro_batch_size={training.micro_batch_size}")
    if parallelism.recompute != "full":
        latent = parallelism.recompute == "none" and spec.model.family != "dense"
        remedies.append(f"set parallelism.recompute={'latent or full' if latent else 'full'}")
    if parallelism.zero_stage == 0 and shape.data > 1:
        remedies.append("set parallelism.zero_stage=1")
    if parallelism.zero_stage > 0 and spec.optimizer.loro is None:
        remedies.append("use more replicas, which share the optimizer's state")
    if training.precision == "fp32":
        remedies.append("set training.precision=bf16")
    return remedies


def _preset(name: str) -> Preset:
    sizes = PRESETS[name]
    counts = {}
    for family in _FAMILIES:
        model = ModelConfig.model_validate({"preset": name, "family": family, "vocab_size": _PRESET_VOCABULARY})
        counts[family] = parameter_count(model)
    return Preset(
        name=name,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=sizes["num_attention_heads"],
        rank=sizes["rank"],
        vocab_size=_PRESET_VOCABULARY,
        parameters=counts,
    )
