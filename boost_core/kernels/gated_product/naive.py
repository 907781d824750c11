"""The reference: plain torch, differentiated by autograd."""

import torch
from torch.nn.functional import silu


def gated_product(parts: list[torch.Tensor], activation: bool) -> torch.Tensor:
    """``silu(gate) ∘ up`` or ``gate ∘ up``; see the package for the arguments."""
    gate_Tf, up_Tf = (member_Tf for part_gTf in parts for member_Tf in part_gTf)
    gated_Tf: torch.Tensor = (silu(gate_Tf) if activation else gate_Tf) * up_Tf
    return gated_Tf
