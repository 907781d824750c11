"""The frequencies of rotary position embeddings, and their scaling for sequences longer than a model was trained on.

Pair i of a head's e elements turns by θ^(−2i/e) per position (RoFormer, arXiv 2104.09864). Scaled by a factor s, slow
pairs turn s times more slowly and fast ones as before, with a ramp between the two:

======  ================================================================================================================
llama3  by how often a pair turns in the original length: up to ``low_freq_factor`` times it is slow, from
        ``high_freq_factor`` times on fast (Llama 3.1's reference code)
yarn    by the pair's number, between those that turn ``beta_slow`` and ``beta_fast`` times; and queries and keys are
        multiplied by ``attention_factor`` (YaRN, arXiv 2309.00071)
======  ================================================================================================================

Shape suffixes: e here stands for the pairs of a head.
"""

import math

import torch

from boost_core.config.model import RopeScalingConfig


def rotary_frequencies(
    head_size: int, theta: float, scaling: RopeScalingConfig | None, device: torch.device
) -> torch.Tensor:
    """Radians per position for each pair, ``[e/2]`` in float64, so that far positions keep the bits of their angles."""
    plain_e: torch.Tensor = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
    if scaling is None:
        return plain_e
    fast_e = _fast_llama3(plain_e, scaling) if scaling.rope_type == "llama3" else _fast_yarn(plain_e, theta, scaling)
    return plain_e * (fast_e + (1 - fast_e) / scaling.factor)


def _fast_llama3(plain_e: torch.Tensor, scaling: RopeScalingConfig) -> torch.Tensor:
    """How fast each pair is taken to be, from 0 to 1."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None
    turns_e = scaling.original_max_position_embeddings * plain_e / (2 * math.pi)
    return ((turns_e - low) / (high - low)).clamp(0, 1)


def _fast_yarn(plain_e: torch.Tensor, theta: float, scaling: RopeScalingConfig) -> torch.Tensor:
    assert scaling.beta_fast is not None and scaling.beta_slow is not None
    head_size, length = 2 * len(plain_e), scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return head_size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_size - 1)
    number_e = torch.arange(len(plain_e), dtype=plain_e.dtype, device=plain_e.device)
    return 1 - ((number_e - first) / (last - first or 0.001)).clamp(0, 1)
