"""Corpora of many files: filtered, deduplicated, tokenized, shuffled and sharded, by processes here or by Ray Data.

::

    each file (files.py): documents → filters → tokens, keys and signatures ─┐ runs, sorted by the shuffle's keys
    all runs (duplicates.py): documents that share a key ────────────────────┤ which documents are dropped
    each shard (shards.py): its range of the shuffle's keys ─────────────────┘ from all runs, in order

Each function is plain: what it gives follows from the corpus alone, whoever calls it, in whichever order. ``build.py``
calls them by an engine (``engine.py``).
"""
