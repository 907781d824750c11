"""A model's scores on tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness)."""

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from boost_core.inference.generate import LoadedModel
from boost_core.messages import Score, Scores

_HASH_DIGITS = 16
_STDERR = "_stderr"


def tasks_in(paths: Sequence[str]) -> tuple[TaskManager, list[str]]:
    """The tasks in files and in all files of folders.

    Raises:
        ValueError: A path has no task file, or one that is not UTF-8.
    """
    places = [Path(path).resolve() for path in paths]
    for text, place in zip(paths, places, strict=True):
        if not place.exists():
            raise ValueError(f"no task file or folder is at {text!r}; check --tasks")
        try:
            if place.is_file():  # of a folder's files, those that are no tasks are left out
                place.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"task file {text!r} is not UTF-8 at byte {error.start}; convert it") from error
    folders = {str(place if place.is_dir() else place.parent) for place in places}
    manager = TaskManager(include_path=sorted(folders), include_defaults=False)
    tasks: list[str] = []
    for text, place in zip(paths, places, strict=True):
        names = [
            name
            for name, entry in manager.task_index.items()
            if entry.yaml_path and place in (path := entry.yaml_path.resolve(), *path.parents)
        ]
        if not names:
            named = re.search(r"""^task: *["']?([^\s"'#]+)""", place.read_text(), re.M) if place.is_file() else None
            if named and (other := manager.task_index.get(named[1])) and other.yaml_path:  # it keeps one of a name
                problem = f"{text!r} and {str(other.yaml_path)!r} both have the task {named[1]!r}"
                raise ValueError(f"{problem}; rename one, or move it to another folder")
            raise ValueError(f"{text!r} has no task of lm-eval: a YAML file with a field task")
        tasks += names
    return manager, list(dict.fromkeys(tasks))


def evaluate(loaded: LoadedModel, paths: Sequence[str], limit: int | None, batch_size: int) -> Scores:
    """Score a model.

    Args:
        loaded: The model.
        paths: Task files and folders of them.
        limit: Maximum number of documents per task; ``None`` for all.
        batch_size: Sequences per batch.

    Raises:
        ValueError: No task was found, or lm-eval cannot run one.
    """
    manager, names = tasks_in(paths)
    lm_eval.evaluator.get_git_commit_hash = lambda: None  # git prints an error outside a repository
    try:
        model = HFLM(
            pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size,
            max_length=loaded.sequence_length, prefix_token_id=loaded.model.config.eos_token_id,
        )  # fmt: skip
        results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, limit=limit, log_samples=True)
    except Exception as error:  # from the task's code, its data, or the hub it names
        raise ValueError(f"lm-eval cannot evaluate {', '.join(names)}: {type(error).__name__}: {error}") from error
    assert results is not None  # it is None only on ranks other than the first, and there is only one
    scores = []
    for task, values in results["results"].items():
        better, version = results["higher_is_better"].get(task, {}), results["versions"].get(task)
        samples = results.get("samples", {}).get(task, ())
        prompts = "".join(f"{each['doc_hash']}{each['prompt_hash']}{each['target_hash']}" for each in samples)
        of_task: dict[str, Any] = {
            "task": task, "samples": results.get("n-samples", {}).get(task, {}).get("effective", 0),
            "version": None if version is None else str(version),
            "task_hash": hashlib.sha256(prompts.encode()).hexdigest()[:_HASH_DIGITS],
        }  # fmt: skip
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith(_STDERR):  # a fact about the task, or the error of a metric
                continue
            both = value, values.get(f"{metric}{_STDERR},{kind}")
            finite, stderr = (float(x) if isinstance(x, int | float) and math.isfinite(x) else None for x in both)
            named, higher = metric if kind == "none" else name, better.get(metric)
            scores.append(Score(metric=named, value=finite, stderr=stderr, higher_is_better=higher, **of_task))
    return Scores(step=loaded.step, evaluated_by=f"lm-eval {results['lm_eval_version']}", scores=tuple(scores))
