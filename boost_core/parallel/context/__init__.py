"""Context parallelism as it runs: carries out plans of ``plan/context`` over a process group.

* ``attention`` is what a model calls: queries, keys and values of a rank's own tokens in, its attention out;
* ``exchange`` sends keys and values, and brings their gradients back, a stage at a time;
* ``pieces`` is the attention of one stage, by torch's kernels.

The plan decides and this obeys: nothing here asks who has which tokens.
"""
