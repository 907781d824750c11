"""Python runs this at its start: what torch's CUDA build comes without is taken from the tests' own environment."""

import os
import sys

sys.path.append(os.environ["MOCK_GPU_PACKAGES"])  # last, so that torch is that of the CUDA build
