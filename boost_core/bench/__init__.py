"""The cost of one rank's work: kernels, a whole step, collectives. ``boost bench --help`` lists the benchmarks."""
