"""What is run on a GPU, which the tests' own machines do not have: ``make gpu-bundle``, and ``run`` in its archive."""
