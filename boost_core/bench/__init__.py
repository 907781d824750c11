"""What one rank's work costs: kernels, a whole step, collectives. ``boost bench --help`` lists the benchmarks."""
