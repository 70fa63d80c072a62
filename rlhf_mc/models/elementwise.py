"""RMSNorm and SwiGLU with a backward of their own. Autograd's takes about twice as many passes over memory, and on a CPU
that is what a small model's training spends its time on. TransformerEngine's kernels would be the faster choice on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class _RMSNormFunction(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467); the rms in fp32, the result in x's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return torch.mul(x, inverse_rms.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # With r = 1 / rms(x) and g = grad * weight:  d x = r g - x r^3 mean(g x),  d weight = sum over tokens of grad * x * r
        x, weight, inverse_rms = ctx.saved_tensors
        normed = torch.mul(x, inverse_rms.to(x.dtype))
        grad_normed = torch.mul(grad, weight)
        slope = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(x.size(-1))
        grad_x = torch.addcmul(grad_normed, normed, slope, value=-1.0).mul_(inverse_rms.to(x.dtype))
        grad_weight = normed.mul_(grad).flatten(0, -2).sum(dim=0, dtype=_at_least_fp32(x.dtype)).to(weight.dtype)
        return grad_x, grad_weight, None


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_at_least_fp32(x.dtype))
    return norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()


class RMSNorm(nn.Module):
    """megatron's norm slot. The weight carries `sequence_parallel`, by which megatron sums its gradient over tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **megatron_arguments) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNormFunction.apply(x, self.weight, self.eps)


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up (arXiv:2002.05202) of x = [gate, up]; x alone is kept for the backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(torch.mul(grad, up), gate))
        return grad_x


class SwiGLU(nn.Module):
    """megatron's slot for an activation between the two linear layers of the MLP: [..., 2 * ffn] -> [..., ffn]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLUFunction.apply(x)
