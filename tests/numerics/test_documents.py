"""Documents packed into one sequence that do not see each other: each has the losses that it has alone."""

import numpy as np
import pytest
import torch

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.models.build import build
from boost_core.models.decoder import Decoder
from boost_core.nn.attention import Rotation
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.parallel.shard import make_weights
from boost_core.train.batch import Batch

END = 0
CPU = torch.device("cpu")
LENGTHS = [[5, 1, 9], [15], [2, 2, 11]]


def network(family: str, window: int | None) -> tuple[ModelConfig, Decoder]:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 8}
    config = ModelConfig.model_validate(shape | {"family": family, "num_key_value_heads": 2, "sliding_window": window})
    decoder, axes = build(config, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    make_weights(decoder, axes, 0, 1, 7, CPU, torch.float64)
    return config, decoder


def losses(config: ModelConfig, decoder: Decoder, batch: Batch, length: int) -> torch.Tensor:
    rotation = Rotation.of(config, length, CPU)
    return decoder(batch.tokens, batch.targets, rotation.with_document_mask(batch.documents))


@pytest.mark.parametrize(("family", "window"), [("cola", None), ("lax", None), ("cola", 4)])
def test_a_packed_document_has_the_losses_that_it_has_alone(family: str, window: int | None) -> None:
    config, decoder = network(family, window)
    draw = np.random.default_rng(3)
    documents = [[[*draw.integers(1, 256, length - 1).tolist(), END] for length in row] for row in LENGTHS]
    packed = np.array([[*(token for document in row for token in document), 7] for row in documents])
    batch = Batch.of(packed, END, CPU)
    together = losses(config, decoder, batch, 15)
    place = 0
    for document in (document for row in documents for document in row):
        # The token after the last is another document's, or nobody's: its loss does not count.
        alone = Batch.of(np.array([[*document, 1]]), END, CPU)
        expected = losses(config, decoder, alone, len(document))[:-1]
        here = slice(place, place + len(document) - 1)
        torch.testing.assert_close(together[here], expected, rtol=1e-12, atol=0)
        assert batch.counts[place : place + len(document)].tolist() == [1.0] * (len(document) - 1) + [0.0]
        place += len(document)


def test_documents_that_see_each_other_are_one_sequence() -> None:
    batch = Batch.of(np.array([[3, END, 4, 5]]), None, CPU)
    assert batch.documents is None
    assert batch.counts.tolist() == [1.0, 1.0, 1.0]
