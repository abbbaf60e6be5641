"""Fused kernels, each beside the torch arithmetic that it equals.

A kernel is one file with one public function; the function takes the Triton kernel for CUDA tensors and plain torch
elsewhere. What autograd saves is the same on both paths, so memory is the same too. With ``TRITON_INTERPRET=1`` the
kernels run on a CPU in Triton's interpreter, which is how the tests compare the two without a GPU.
"""

from rl3d.kernels.decode import add_rms_norm, rotate_append
from rl3d.kernels.gemv import gemv_add, norm_gemv
from rl3d.kernels.linear import fp32_logits
from rl3d.kernels.paged_attention import paged_decode
from rl3d.kernels.rmsnorm import rms_norm
from rl3d.kernels.rotary import rotary
from rl3d.kernels.strided_copy import CopyTable
from rl3d.kernels.swiglu import swiglu
from rl3d.kernels.token_logprob import logprob_gradient, logprob_statistics

__all__ = [
    "CopyTable", "add_rms_norm", "fp32_logits", "gemv_add", "logprob_gradient", "logprob_statistics", "norm_gemv",
    "paged_decode", "rms_norm", "rotary", "rotate_append", "swiglu",
]  # fmt: skip
