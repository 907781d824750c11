"""Import and export of models: ``python -m boost_core.convert --help``."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from boost_core.architecture import is_dense, is_low_rank
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import load_job
from boost_core.convert import model_folder as models
from boost_core.convert import nanotron
from boost_core.convert.export import DTYPES, MAX_SHARD_SIZE, Destination, Export, Hub, export_model, trained_on
from boost_core.terminal import print_lines


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 2 if something cannot be converted, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m boost_core.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to_model = commands.add_parser("export", help="export a checkpoint as safetensors and config.json")
    add = to_model.add_argument
    add("checkpoints", help="folder of a job's checkpoints or of one of them, a path or a URL")
    add("model", help="destination of the model: a new folder, or an s3:// URL")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    add("--dtype", choices=DTYPES, default="fp32", help="type of the tensors (default: fp32)")
    add("--max-shard-size", type=_size, default=MAX_SHARD_SIZE, help="largest size of a file (default: 5GB)")
    add("--merge", action="store_true", help="multiply out low-rank products: a plain dense model")
    add("--tokenizer", help="path of tokenizer.json, if it has moved since the job ran")
    add("--push", metavar="REPO", help="also push the model to this repository on a hub")
    add("--known", type=Path, help=argparse.SUPPRESS)  # file with the service's records of the job
    add("--nanotron", type=int, metavar="TP", help="write a dense model in nanotron's format, for TP ranks")
    from_model = commands.add_parser("start", help="convert a model into a checkpoint that a job can start from")
    from_model.add_argument("model", type=Path, help="folder of config.json and safetensors, or a nanotron checkpoint")
    from_model.add_argument("job", type=Path, help="the job, YAML or JSON")
    from_model.add_argument("checkpoints", help="folder to write it to, for the job's checkpoint.weights_from")
    arguments = parser.parse_args(command_line)
    if arguments.command == "export":
        return models.exit_status(partial(export, arguments))
    return models.exit_status(partial(start, arguments.model, arguments.job, arguments.checkpoints))


def export(options: argparse.Namespace) -> None:
    """Export a checkpoint's model, in nanotron's format if requested.

    Raises:
        CheckpointDamaged: The checkpoint is not what was written; nothing is exported.
        ValueError: The checkpoint does not exist, cannot be exported this way, or the destination is not empty.
        OSError: The checkpoint cannot be read, or the destination or the hub does not accept the model.
    """
    if options.nanotron is not None:
        if options.merge or options.push or options.dtype != "fp32":
            raise ValueError("--nanotron writes fp32 into a folder; leave out --merge, --push and --dtype")
        if options.nanotron < 1:
            raise ValueError(f"--nanotron {options.nanotron} is not a number of ranks; give 1 or more")
        if "://" in options.model:
            raise ValueError(f"--nanotron writes to a local folder, which {options.model} is not; give a path")
        Destination(options.model)  # refuses a folder with anything in it: shards of two exports would mix
    folder, step = models.chosen_checkpoint(options.checkpoints, options.step)
    with models.damage_named(folder, step):
        if options.nanotron is None:
            known = json.loads(options.known.read_bytes()) if options.known else {}
            how = Export(DTYPES[options.dtype], options.max_shard_size, options.merge, options.tokenizer, **known)
            destination, hub = Destination(options.model), Hub(options.push) if options.push else None
            export_model(folder, step, destination, how, hub)
        else:
            model, weights = models.read_weights(folder, step)
            _, about = trained_on(folder.manifest(step), model, options.tokenizer)
            published = models.to_published(model, weights)
            nanotron.write_nanotron(Path(options.model), model, published, about, options.nanotron)
    print_lines(f"exported step {step} to {options.model}")


def start(model_folder: Path, job_file: Path, checkpoints: str) -> None:
    """Convert a model into a checkpoint to start a job from, for the job's ``checkpoint.weights_from``.

    A dense model is factored to the rank of a job whose model is svd or cola.

    Raises:
        ValueError: The model is not the job's, or computes a different function.
    """
    job = load_job(job_file)
    published: models.Source
    if (model_folder / nanotron.CONFIG).exists():
        there, tensors = nanotron.read_nanotron(model_folder)
        published = models.InMemory(tensors)
    else:
        published = models.ModelFolder(model_folder)
        there = published.model
    models.refuse_another_function(there, job.model)
    if is_dense(there) and is_low_rank(job.model):
        published = models.Factored(published, job.model.bottleneck_rank)
    models.write_start(CheckpointFolder(checkpoints), job, published)


def _size(text: str) -> str:
    if not re.fullmatch(r"0*[1-9]\d*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 500MB or 5GB")
    return text


if __name__ == "__main__":
    sys.exit(main())
