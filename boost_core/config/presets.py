"""Published model shapes.

``60m`` to ``1b`` and ``7b`` are from the CoLA paper (arXiv 2502.10940); ``3b``, ``13b`` and ``30b`` are from BOOST's
systems runs (arXiv 2512.12131), which use LLaMA's shapes with r = d/4; ``40b`` adds layers to the 30B shape;
``tiny`` is ours, for laptops.
"""

from typing import Any


def _shape(hidden_size: int, intermediate_size: int, layers: int, heads: int, rank: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "rank": rank,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(128, 344, 4, 4, 32) | {"gate_activation": True},
    "60m": _shape(512, 1376, 8, 8, 128) | {"gate_activation": True},
    "130m": _shape(768, 2048, 12, 12, 256) | {"gate_activation": True},
    "350m": _shape(1024, 2736, 24, 16, 256),
    "1b": _shape(2048, 5461, 24, 32, 512),
    "3b": _shape(3072, 8192, 28, 24, 768),
    "7b": _shape(4096, 11008, 32, 32, 1024),
    "13b": _shape(5120, 13824, 40, 40, 1280),
    "30b": _shape(8192, 22016, 36, 64, 2048),
    "40b": _shape(8192, 22016, 48, 64, 2048),
}
