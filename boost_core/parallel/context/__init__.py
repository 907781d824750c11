"""Context parallelism at run time: carries out plans of ``plan/context`` over a process group.

* ``layer`` is what a model calls: queries, keys and values of a rank's own tokens in, and, when other ranks' keys have
  come, its attention out;
* ``attention`` is how that follows a plan, forward and backward, for all layers;
* ``arrivals`` are keys under way, stage by stage;
* ``stage`` is one stage on a rank: what it sends and receives, and the attention to it;
* ``sums`` are attention and gradients added up over stages;
* ``exchange`` sends chunks of keys and values, or of latents, and returns their gradients;
* ``moved`` sends queries to where their attention is computed, and returns the outputs; ``moved_latents`` sends the
  latents of both instead;
* ``latents`` computes keys and values from received latents;
* ``pieces`` is the attention of one stage, by torch's kernels.

The plan decides who has which tokens; this package only carries it out.
"""
