"""Exports held to CoLA's published class itself, of a checkout of https://github.com/alvin-zyl/CoLA.

Its code needs a release of transformers of its time, in a folder of its own::

    pip install --target SITE --no-deps transformers==4.48.3 tokenizers==0.21.4 huggingface_hub==0.36.0
    PYTHONPATH=SITE python -m tests.benchmarks.published_cola PATH

It prints the largest difference of a log-probability for every model that CoLA's class computes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.exports import COLA, TOKENS, export_to, log_probabilities, model_with
from tests.numerics import published_cola

# The class takes norms, angles and the attention's softmax in fp32 whatever its weights are: 6e-6 in these models. With
# an activation too many or too few it is 2.
TOLERANCE = 5e-5


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.published_cola", description="Hold exports to it."
    )
    parser.add_argument("path", help="a checkout of CoLA's published code")
    sys.path.insert(0, parser.parse_args().path)
    from cola import ColaForCausalLM  # type: ignore[import-not-found]

    failed = False
    for name, changes in COLA.items():
        with tempfile.TemporaryDirectory() as folder:
            model = model_with(changes)
            export_to(Path(folder), model)
            theirs = ColaForCausalLM.from_pretrained(folder, torch_dtype=torch.float64)
            logits = theirs(TOKENS[None]).logits[0].log_softmax(-1).detach()
            ours = (logits - log_probabilities(model)).abs().max().item()
            restated = (logits - published_cola.log_probabilities(Path(folder), TOKENS)).abs().max().item()
            print(f"{name:24} differs from our decoder by {ours:.1e}, from the restatement by {restated:.1e}")  # noqa: T201
            failed |= max(ours, restated) > TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
