"""Models in and out of the trainer: ``python -m boost_core.convert --help``."""

import argparse
import sys
from pathlib import Path

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged
from boost_core.config import load_job
from boost_core.config.base import in_lines
from boost_core.convert.compare import is_cut, refuse_another_function
from boost_core.convert.factor import factored
from boost_core.convert.model_folder import read_model, write_model
from boost_core.convert.names import fill_from_published, to_published
from boost_core.convert.nanotron.llama import CONFIG as NANOTRON_CONFIG
from boost_core.convert.nanotron.llama import read_nanotron, write_nanotron
from boost_core.convert.trained_on import trained_on
from boost_core.convert.whole import empty_weights, read_weights, write_start


def main() -> int:
    """Run one command; 0 on success, 2 for what cannot be converted."""
    arguments = _parser().parse_args()
    try:
        if arguments.command == "export":
            export(arguments.checkpoints, arguments.model, arguments.step, arguments.nanotron)
        else:
            start(arguments.model, arguments.job, arguments.checkpoints)
    except (OSError, ValueError) as error:
        print(in_lines(error), file=sys.stderr)
        return 2
    return 0


def export(checkpoints: str, model_folder: Path, step: int | None, nanotron_ranks: int | None) -> None:
    """Write a checkpoint's model, fp32, under its published names, or as nanotron would.

    Args:
        checkpoints: Folder of a job's checkpoints, a path or a URL.
        model_folder: Where the model goes.
        step: Which checkpoint; the newest by default.
        nanotron_ranks: Tensor parallel ranks of nanotron to write as; ``None`` for safetensors with published names.

    Raises:
        CheckpointDamaged: The checkpoint is not what was written; nothing is exported.
        ValueError: There is no such checkpoint, nanotron has no such model, or the folder holds another.
    """
    folder = CheckpointFolder(checkpoints)
    steps = folder.steps()
    if not steps or step not in (None, *steps):
        raise ValueError(f"{checkpoints} holds no {f'checkpoint of step {step}' if steps else 'checkpoint'}; check it")
    chosen = steps[-1] if step is None else step
    try:
        model, weights = read_weights(folder, chosen)
    except CheckpointDamaged as damage:
        others = ", ".join(str(other) for other in steps if other != chosen) or "there is none"
        raise CheckpointDamaged(
            f"the checkpoint of step {chosen} is damaged: {damage}; restore it, or choose another with --step: {others}"
        ) from damage
    about, published = trained_on(folder.manifest(chosen)), to_published(model, weights)
    if nanotron_ranks is None:
        write_model(model_folder, model, published, about)
    else:
        write_nanotron(model_folder, model, published, about, nanotron_ranks)


def start(model_folder: Path, job_file: Path, checkpoints: str) -> None:
    """Make a model what a job starts from: ``checkpoint.resume_from`` of the job, when it is submitted.

    A dense model is cut to the rank of a job whose model is svd or cola.

    Raises:
        ValueError: The model is not the job's, or computes something else.
    """
    job = load_job(job_file)
    from_nanotron = (model_folder / NANOTRON_CONFIG).exists()
    there, published = read_nanotron(model_folder) if from_nanotron else read_model(model_folder)
    refuse_another_function(there, job.model)
    if is_cut(there, job.model):
        published = factored(published, job.model.bottleneck_rank)
    weights = empty_weights(job.model)
    fill_from_published(job.model, weights, published)
    write_start(CheckpointFolder(checkpoints), job, weights)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m boost_core.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to_model = commands.add_parser("export", help="export a checkpoint as safetensors and config.json")
    to_model.add_argument("checkpoints", help="folder of a job's checkpoints, a path or a URL")
    to_model.add_argument("model", type=Path, help="folder to write the model to")
    to_model.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    to_model.add_argument(
        "--nanotron", type=int, metavar="TP", help="write a dense model as TP ranks of nanotron would"
    )
    from_model = commands.add_parser("start", help="convert a model into a checkpoint that a job can start from")
    from_model.add_argument(
        "model", type=Path, help="folder with config.json and safetensors, or a checkpoint of nanotron's"
    )
    from_model.add_argument("job", type=Path, help="the job, YAML or JSON")
    from_model.add_argument("checkpoints", help="folder to write it to, for the job's checkpoint.resume_from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
