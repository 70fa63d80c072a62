"""megatron-core's optimizer for one role: AdamW over fp32 main params, sharded over the ranks with the same weights where asked."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import nn

from rlhf_mc.config import Optim
from rlhf_mc.parallel.megatron_cpu import cpu_tensors_pass_for_cuda


def kernels_in_use(device: torch.device) -> str:
    """Which optimizer and norm megatron-core took, for the start-up message: TransformerEngine's, apex's or torch's.

    apex is only ever detected; a package of that name which is not NVIDIA's was refused at the launch.
    """
    if importlib.util.find_spec("transformer_engine"):
        return "optimizer and gradient norm: TransformerEngine"
    if importlib.util.find_spec("apex") and importlib.util.find_spec("apex.optimizers"):
        return "optimizer and gradient norm: apex"
    return "optimizer and gradient norm: torch" + (" (fused AdamW)" if device.type == "cpu" else "")


def wrap_for_training(decoder: nn.Module, distributed_optimizer: bool) -> DistributedDataParallel:
    """Gradient buckets in fp32, summed (not averaged) over the ranks with the same weights when they are finalised."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(decoder.config, config, decoder)


def megatron_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that megatron chains, or the one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """What steps the params inside megatron's optimizer; none on a rank without params of its own."""
    return [part.optimizer for part in megatron_parts(optimizer) if part.optimizer is not None]


def _create_states(adam: torch.optim.Optimizer) -> None:
    """Moments and step of every param, as AdamW would make them at its first step: so what is resident is known from the start."""
    for group in adam.param_groups:
        for param in group["params"]:
            adam.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }


def build_optimizer(
    ddp: Sequence[DistributedDataParallel], optim: Optim, dtype: torch.dtype, device: torch.device
) -> MegatronOptimizer:
    """Collective over all ranks. Of all chunks of a model on this rank, one at least.

    The params must hold their starting weights already: the fp32 main params copy them.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=ddp[0].ddp_config.use_distributed_optimizer,
    )
    with cpu_tensors_pass_for_cuda(device.type != "cuda"):
        optimizer = get_megatron_optimizer(config, list(ddp), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # megatron leaves this to its own learning-rate scheduler: no decay of norms and biases.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    for adam in torch_optimizers(optimizer):
        if isinstance(adam, torch.optim.AdamW):
            # One pass over memory instead of about ten; torch has this kernel on CPU and on CUDA.
            for group in adam.param_groups:
                group["fused"], group["foreach"] = True, False
            _create_states(adam)
    return optimizer


def step_optimizer(optimizer: MegatronOptimizer, lr: float, on_cpu: bool, allows: Callable[[float], bool] = math.isfinite) -> float:
    """Collective over all ranks. One AdamW step at `lr` on finalised gradients; the gradient norm before clipping.

    allows: whether to step with this norm, alike on all ranks; where not, params and moments stay as they are, bit for bit.
    It is megatron's own step, but for a look at the norm between clipping and stepping.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with cpu_tensors_pass_for_cuda(on_cpu), torch.no_grad():
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if allows(grad_norm):
            for part in megatron_parts(optimizer):
                if part.optimizer is not None and part.get_parameters():
                    clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, grad_norm)
            optimizer.step_with_ready_grads()
    return grad_norm
