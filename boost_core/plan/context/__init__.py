"""Context parallelism as a plan: which rank holds which tokens of a window, attends to what, and receives which keys.

The common form of published systems (FCP, arXiv 2605.08524; DistCA, 2510.18121; MTraining, 2510.18830; MagiAttention)
consists of chunks of tokens, a map of chunks to ranks, tasks (a chunk's queries and the chunks of keys that they see)
with the rank that computes each, the transfers that follow from these, and their order:

* ``window`` cuts packed documents into chunks and counts the query-key pairs of each;
* ``placement`` and ``near`` deal chunks to ranks, the same number to each;
* ``tasks`` says where each chunk's attention is computed;
* ``transfers`` says what ranks send each other, in rounds and in stages of even traffic;
* ``pieces`` is one rank's part of all this, as ``parallel/context`` carries it out;
* ``cost`` and ``figures`` turn this into bytes and seconds;
* ``dealt`` is how the trainer deals tokens, and ``between`` what its ranks send to other nodes;
* ``wire`` is what a rank is sent of one document, over which links.

Placements, tasks and transfers are in integers and in a fixed order, and which placement a micro-batch gets is by sums
in a fixed order, so that ranks agree, each by itself.
``tests/benchmarks/context.py`` compares all of it with other systems' rules.
"""
