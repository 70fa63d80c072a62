"""What the tests of offload/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from models.on_ranks import exported, make_role, train_step
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, score, update, zero_gradients
from rlhf_mc.models.role import Role, RoleModel
from rlhf_mc.offload import TRAINING, Ledger, ModelState, Part, Residency
from rlhf_mc.parallel.world import World, seed_everything

OPTIM = Optim(lr=1e-3, weight_decay=0.1)
#: So small that every part has several storages.
CHUNK_BYTES = 32 << 10


def actor_and_critic(world: World, language: str, value: str, dtype: str, distributed: bool) -> list[RoleModel]:
    """Two trained roles."""
    return [
        make_role(world, language, "language", OPTIM, dtype, distributed),
        make_role(world, value, "value", OPTIM, dtype, distributed),
    ]


def residency_of(world: World, models: list[RoleModel], **settings) -> Residency:
    """A residency over `models`, everything off the device."""
    return Residency(world, [ModelState.of(model, CHUNK_BYTES) for model in models], Ledger(), **settings)


def trained(
    world: World, language: str, value: str, batch: SequenceBatch, dtype: str, distributed: bool, steps: int, offload: bool
) -> dict[str, Tensor]:
    """Actor and critic take turns for `steps` steps; with `offload`, everything leaves between any two stages."""
    models = actor_and_critic(world, language, value, dtype, distributed)
    residency = residency_of(world, models, enabled=offload)
    results: dict[str, Tensor] = {}
    for step in range(steps):
        for model in models:
            with residency.on_device(model.role, Part.PARAMS):
                results[f"{model.role.value} score {step}"] = score(model, batch, "predicted", MicroBatch())
            with residency.on_device(model.role, TRAINING):
                norm = train_step(model, batch, 1e-3) if model.role is Role.ACTOR else regress(model, batch)
                results[f"{model.role.value} norm {step}"] = torch.tensor(norm)
            if step % 3 == 0:
                residency.all_off()
    for model in models:
        with residency.on_device(model.role, TRAINING):
            results |= {f"{model.role.value} {name}": tensor for name, tensor in exported(model).items()}
            for part, what, tensor in residency.state(model.role).tensors():
                if part is not Part.GRADS:
                    results[f"{model.role.value} {part.label} {what}"] = tensor.detach().clone()
    return results


def regress(model: RoleModel, batch: SequenceBatch) -> float:
    """One step of a value model towards 1 at every predicted token; the gradient norm."""
    count = int(batch.loss_mask.sum())
    loss = Loss(("sum",), lambda values, microbatch: LossSum((values - 1).square().sum() / count, {"sum": values.sum()}))
    zero_gradients(model)
    accumulate_gradients(model, batch, "predicted", MicroBatch(), loss)
    return update(model, 1e-3)


def compare_training(world: World, steps: int, **arguments) -> list[str]:
    """Names of results that differ in any bit between training with offload and without."""
    seed_everything(1)
    plain = trained(world, steps=steps, offload=False, **arguments)
    seed_everything(1)
    offloaded = trained(world, steps=steps, offload=True, **arguments)
    assert len(plain) > 50 and plain.keys() == offloaded.keys()
    return [name for name in plain if not torch.equal(plain[name], offloaded[name])]
