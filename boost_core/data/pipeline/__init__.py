"""Corpora of many files: filtered, deduplicated, tokenized, shuffled and sharded by local processes or Ray Data.

::

    each file: documents → filters → tokens, keys and signatures ─┐ runs, sorted by shuffle key
    all runs: documents that share a key ─────────────────────────┤ which documents are dropped
    each shard: its range of the shuffle's keys ──────────────────┘ from all runs, in order

All functions are pure: their results depend only on the corpus, not on who calls them or in which order. ``build.py``
calls them through an engine (``engine.py``).
"""
