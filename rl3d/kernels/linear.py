"""Logits with fp32 accumulation kept: a 16-bit logit of 20 is only known to within 0.06."""

import torch
from torch import Tensor


def fp32_logits(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """``hidden @ weight.T`` as fp32 [N, V]. On CUDA the 16-bit operands meet tensor cores and only the result is wide."""
    if hidden_NH.dtype == torch.float32:
        return hidden_NH @ weight_VH.t()
    if hidden_NH.is_cuda:
        return torch.mm(hidden_NH, weight_VH.t(), out_dtype=torch.float32)
    return hidden_NH.float() @ weight_VH.float().t()
