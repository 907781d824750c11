"""What models are made of, stated once: modules build themselves from it, the plan counts it, converters name by it.

``projections`` has those of a decoder block, ``roles`` what a weight is and does, ``families`` the weights of each
family with their published names, ``sharding`` which of their axes each tensor parallel strategy splits and what its
ranks exchange. No other file asks which family or strategy it is (``tests/architecture/test_branches.py``).
"""
