"""Context parallelism as it runs: carries out plans of ``plan/context`` over a process group.

* ``attention`` is what a model calls: queries, keys and values of a rank's own tokens in, its attention out;
* ``stage`` is one stage of a rank: what comes and goes, and the attention to it;
* ``exchange`` sends chunks of keys and values, or of latents, and brings their gradients back;
* ``latents`` makes keys and values of latents that have come;
* ``pieces`` is the attention of one stage, by torch's kernels.

The plan decides and this obeys: nothing here asks who has which tokens.
"""
