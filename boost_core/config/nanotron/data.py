"""The data of a foreign configuration, which can only be described and must be set by its owner."""

from typing import Any

from boost_core.config.nanotron.reader import Reader, assignment


def data_section(reader: Reader) -> tuple[dict[str, Any], dict[str, str]]:
    """Data of the same kind without paths, which does not validate, and the fields that must be set."""
    first, path = _stages(reader)
    dataset = first.get("dataset")
    tokenizer = reader.take("tokenizer.tokenizer_name_or_path", None)
    if isinstance(dataset, dict) and "dataset_folder" not in dataset and not dataset.get("load_from_disk"):
        return _of_text(dataset, f"{path}.dataset", tokenizer)
    remedy = "tokenize the documents with `boost data tokenize` and name the folder that it writes"
    unset = {"data.source.paths": f"{_described(dataset, f'{path}.dataset')}; {remedy}"}
    return {"source": {"kind": "tokenized", "paths": []}}, unset


def _of_text(dataset: dict[str, Any], path: str, tokenizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    source: dict[str, Any] = {"kind": "dataset", "paths": [], "text_field": dataset.get("text_column_name") or "text"}
    remedy = "nothing is downloaded; save it with save_to_disk of Hugging Face's datasets and name the folder"
    unset = {
        "data.source.paths": f"{_described(dataset, path)}; {remedy}",
        "data.tokenizer": f"{assignment('tokenizer.tokenizer_name_or_path', tokenizer)}; name its tokenizer.json",
    }
    return {"source": source, "tokenizer": ""}, unset


def _described(dataset: Any, path: str) -> str:
    if not isinstance(dataset, dict):
        return f"{assignment(path, dataset)} is random tokens"
    shown = ("dataset_folder", "dataset_weights", "hf_dataset_or_datasets", "hf_dataset_config_name",
             "hf_dataset_splits", "load_from_disk")  # fmt: skip
    return f"{path} has {', '.join(assignment(name, dataset[name]) for name in shown if dataset.get(name))}"


def _stages(reader: Reader) -> tuple[dict[str, Any], str]:
    """The data of the first stage and its path; notes that later stages, if reached, are dropped."""
    stages, steps = reader.content.get("data_stages"), reader.whole("tokens.train_steps")
    if not isinstance(stages, list) or not stages:
        return _mapping(reader.content.get("data")), "data"  # earlier versions of nanotron
    for number, stage in enumerate(stages):
        start = _mapping(stage).get("start_training_step")
        if number > 0 and not (isinstance(start, int) and start > steps):
            named = f"data_stages.{number}.start_training_step"
            reader.note(
                named, start, "the job uses the first stage's data throughout; data.mixture combines sources by weight"
            )
        seed, run = _mapping(_mapping(stage).get("data")).get("seed"), reader.take("general.seed", None)
        if number == 0 and seed not in (None, run):
            reader.note("data_stages.0.data.seed", seed, f"training.seed={run} also orders the data")
    return _mapping(_mapping(stages[0]).get("data")), "data_stages.0.data"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
