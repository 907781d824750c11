"""What models are made of, stated once for the modules that build it, the plan that counts it and the converters.

``projections`` lists the projections of a decoder block, ``roles`` says what a weight is and does, ``families`` has the
weights of each family with their published names, and ``sharding`` which axes each tensor parallel strategy splits and
what its ranks exchange. No other file branches on the family or strategy (``tests/architecture/test_branches.py``).
"""
