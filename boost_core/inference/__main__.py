"""Generation and evaluation with trained models: ``python -m boost_core.inference --help``."""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from boost_core.config.base import INTERRUPTED, counted, hear_interrupts, in_lines
from boost_core.config.parsing.stores import stores_in_words
from boost_core.convert.chosen import chosen_checkpoint
from boost_core.terminal import print_lines


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 2 if it cannot be run, 130 if interrupted."""
    given = _parser().parse_args(command_line)
    hear_interrupts()
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled"
    )  # a single process reads the checkpoint, as intended
    try:
        with stores_in_words():
            (_generate if given.command == "generate" else _evaluate)(given)
    except ImportError as error:
        print_lines(f"{error}; install boost-service[eval]", to=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    return 0


def _generate(given: argparse.Namespace) -> None:
    # Imported here because transformers may not be installed.
    from boost_core.inference.generate import Sampling, generate
    from boost_core.inference.loaded import load_model

    how = Sampling(given.max_new_tokens, given.temperature, given.top_p, given.seed)
    folder, step = chosen_checkpoint(given.checkpoints, given.step)
    generate(load_model(folder, step, given.tokenizer), given.prompt, how, _show)


def _evaluate(given: argparse.Namespace) -> None:
    from boost_core.inference.loaded import load_model
    from boost_core.inference.tasks import evaluate, tasks_in

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about its own defaults
    tasks_in(given.tasks)  # bad paths are refused before anything is loaded
    folder, step = chosen_checkpoint(given.checkpoints, given.step)
    found = evaluate(load_model(folder, step, given.tokenizer), given.tasks, given.limit, given.batch_size)
    width = max(len(score.task) for score in found.scores)
    for score in found.scores:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        value = "not a finite number" if score.value is None else f"{score.value:.4f}"
        print_lines(f"{score.task:<{width}}  {score.metric}  {value}{error}  ({counted(score.samples, 'document')})")
    if given.out:
        Path(given.out).write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _parser() -> argparse.ArgumentParser:
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
    add(
        "--max-new-tokens", type=int, help="maximum number of new tokens (default: 100, or as many as fit the sequence)"
    )
    add("--temperature", type=float, default=1.0, help="0: the likeliest token each time (default: 1)")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens with this total probability")
    add("--seed", type=int, help="seed for sampling (default: a different one each time)")
    add = evaluating.add_argument
    add("--tasks", action="append", required=True, help="an lm-eval task file, or a folder of them; repeatable")
    add("--limit", type=int, help="maximum number of documents per task")
    add("--batch-size", type=int, default=8, help="sequences per batch (default: 8)")
    add("--out", help="write the scores to this file, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
