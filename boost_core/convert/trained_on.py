"""What a job says about those who will run its model: how long sequences are, and which token ends a document."""

import logging

from boost_core.checkpoint.manifest import Manifest
from boost_core.config.data import DataConfig
from boost_core.config.sources.tokenized import read_index
from boost_core.convert.published_config import TrainedOn
from boost_core.data.tokenizers import open_tokenizer

logger = logging.getLogger(__name__)


def trained_on(manifest: Manifest) -> TrainedOn:
    """What a checkpoint's job was trained on; its tokenizer may be out of reach by now, which is a warning."""
    try:
        end = _end_of_document(DataConfig.model_validate(manifest.job["data"]))
    except Exception as error:  # a store's client raises errors of its own
        logger.warning("config.json gets no eos_token_id, because the job's tokenizer cannot be read: %s", error)
        end = None
    return TrainedOn(manifest.sequence_length, end)


def _end_of_document(data: DataConfig) -> int:
    if data.tokenized:
        source, _ = data.sources[0]
        return read_index(source.paths[0]).end_of_document
    return open_tokenizer(data.tokenizer, data.end_of_document).end_of_document
