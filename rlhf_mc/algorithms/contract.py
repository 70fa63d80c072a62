"""What every function of this folder asks of its tensors: flat, equally long, in full precision.

Without these checks a [1] broadcasts against an [R] and a bfloat16 log-prob trains, both without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FULL_PRECISION = (torch.float32, torch.float64)


def require_flat(lengths: Tensor | None = None, mask: Tensor | None = None, **tensors: Tensor) -> None:
    """ValueError unless `tensors` are [N] in float32 or float64, `mask` is bool[N], and `lengths` int64[B] sum to N."""
    first, reference = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FULL_PRECISION:
            raise ValueError(f"{name} is {tensor.dtype}; compute it in float32, a later cast does not bring the digits back")
        if tensor.dim() != 1 or tensor.shape != reference.shape:
            shapes = f"{name} has shape {list(tensor.shape)}, {first} {list(reference.shape)}"
            raise ValueError(f"{shapes}; both must be flat and equally long")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != reference.shape):
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; it must be bool {list(reference.shape)} like {first}")
    if lengths is not None and int(lengths.sum()) != reference.numel():
        raise ValueError(f"the lengths sum to {int(lengths.sum())}, but {first} has {reference.numel()} elements")
