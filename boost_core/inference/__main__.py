"""Generation and evaluation with trained models: ``python -m boost_core.inference --help``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from boost_core.config.base import counted
from boost_core.convert.model_folder import chosen_checkpoint, exit_status
from boost_core.terminal import print_lines


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 2 if it cannot be run, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m boost_core.inference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    generating = commands.add_parser("generate", help="continue a prompt")
    evaluating = commands.add_parser("eval", help="score a checkpoint on lm-eval tasks")
    for command in (generating, evaluating):
        command.add_argument("checkpoints", help="folder of a job's checkpoints or of one of them, a path or a URL")
        command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
        command.add_argument("--tokenizer", help="path of tokenizer.json, if it has moved since the job ran")
    add = generating.add_argument
    add("--prompt", required=True, help="the beginning of a document; may be empty")
    add("--max-new-tokens", type=int, help="maximum number of new tokens (default: 100, or as many as fit)")
    add("--temperature", type=float, default=1.0, help="0: the likeliest token each time (default: 1)")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens with this total probability")
    add("--seed", type=int, help="seed for sampling (default: a different one each time)")
    add = evaluating.add_argument
    add("--tasks", action="append", required=True, help="an lm-eval task file, or a folder of them; repeatable")
    add("--limit", type=int, help="maximum number of documents per task")
    add("--batch-size", type=int, default=8, help="sequences per batch (default: 8)")
    add("--out", help="write the scores to this file, as JSON")
    return exit_status(partial(_run, parser.parse_args(command_line)))


def _run(options: argparse.Namespace) -> None:
    out = getattr(options, "out", None)
    if out and (Path(out).is_dir() or not Path(out).parent.is_dir()):  # said before hours of work
        raise ValueError(f"--out must name a file in a folder that exists, not {out!r}")
    try:
        # Imported here because transformers and lm-eval may not be installed.
        from boost_core.inference.generate import Sampling, generate, load_model

        if options.command == "generate":
            how = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
            folder, step = chosen_checkpoint(options.checkpoints, options.step)
            write = partial(print, end="", flush=True)
            generate(load_model(folder, step, options.tokenizer), options.prompt, how, write)
            return
        from boost_core.inference.tasks import evaluate, tasks_in

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about its own defaults
        tasks_in(options.tasks)  # bad paths are refused before anything is loaded
        folder, step = chosen_checkpoint(options.checkpoints, options.step)
        result = evaluate(load_model(folder, step, options.tokenizer), options.tasks, options.limit, options.batch_size)
    except ImportError as error:
        raise ValueError(f"{error}; install boost-service[eval]") from error
    width = max(len(score.task) for score in result.scores)
    for score in result.scores:
        spread = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        value = "not a finite number" if score.value is None else f"{score.value:.4f}"
        print_lines(f"{score.task:<{width}}  {score.metric}  {value}{spread}  ({counted(score.samples, 'document')})")
    if options.out:
        Path(options.out).write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
