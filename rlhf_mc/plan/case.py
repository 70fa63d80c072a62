"""What is planned: settings on a machine, with the shapes of their models; and the stages of one iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from rlhf_mc.config import MicroBatch, Settings
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.activations import Layers, Tokens
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.roles import TRAINED_ROLES, VALUE_ROLES, Role, role_paths
from rlhf_mc.offload.minimum import RoleBytes, Visit
from rlhf_mc.offload.parts import TRAINING, Part
from rlhf_mc.offload.planned import planned_bytes, planned_visits
from rlhf_mc.offload.sizes import Place
from rlhf_mc.plan.machine import ASSUMED, Assumptions, Machine

#: time_sharing: a role is on the device while a stage needs it (offload.enabled).  resident: all roles are, always (not enabled).
#: forward_offload: trained roles are, always; frozen ones while a stage needs them.
Placement = Literal["time_sharing", "forward_offload", "resident"]


@dataclass(frozen=True)
class Workload:
    """sequences: of one iteration.  prompt, response: tokens of each, on average.  longest: of any sequence."""

    sequences: int
    prompt: float
    response: float
    longest: int

    @staticmethod
    def of(settings: Settings, prompt: float | None = None, response: float | None = None) -> Workload:
        """Of these settings; lengths are their longest where nothing better is known."""
        data, rollout = settings.data, settings.rollout
        prompt, response = prompt or data.max_prompt_tokens, response or rollout.max_tokens
        return Workload(settings.num_sequences, prompt, response, data.max_prompt_tokens + rollout.max_tokens)

    @property
    def length(self) -> float:
        """Tokens of a sequence, on average."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Stage:
    """A stage of one iteration, and what it claims of the device. kind decides what it holds beside the roles' states."""

    kind: Literal["sync", "generate", "score", "train"]
    name: str
    visit: Visit

    @property
    def role(self) -> Role | None:
        """Whose turn it is."""
        return self.visit.role


@dataclass(frozen=True)
class Case:
    """Settings on a machine. shapes: of each role's model.  sizes: what was computed before, by place; shared by all variants.

    only: the roles that are there at all, where the others have devices of their own; None: all of the run's.
    """

    settings: Settings
    machine: Machine
    workload: Workload
    shapes: Mapping[Role, ModelShape]
    assumed: Assumptions = ASSUMED
    placement: Placement = "time_sharing"
    only: tuple[Role, ...] | None = None
    sizes: dict[tuple[Place, bool], dict[Role, RoleBytes]] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(settings: Settings, machine: Machine, workload: Workload | None = None, assumed: Assumptions = ASSUMED) -> Case:
        """Reads the models' config.json. Raises ConfigError where one is missing or not supported."""
        shapes = {role: read_shape(path, f"{role.value}.path") for role, path in role_paths(settings).items()}
        placement = "time_sharing" if settings.offload.enabled else "resident"
        return Case(settings, machine, workload or Workload.of(settings), shapes, assumed, placement)

    def variant(self, settings: Settings) -> Case:
        """The same models, machine and work with other settings of layout, micro-batches, recomputing and engine."""
        return replace(self, settings=settings)

    @property
    def num_trainers(self) -> int:
        """Ranks that train."""
        return self.settings.num_trainer_ranks("train", self.machine.num_gpus)

    @property
    def copies(self) -> int:
        """Copies of each role's model."""
        parallel = self.settings.parallel
        return self.num_trainers // (parallel.tensor * parallel.pipeline)

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.copies // self.settings.parallel.context

    @property
    def is_apart(self) -> bool:
        """Whether engines have ranks of their own."""
        return self.settings.rollout.placement == "separate"

    @property
    def chunks(self) -> int:
        """Chunks of layers on each pipeline rank."""
        return self.settings.parallel.virtual_pipeline

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a parameter or activation."""
        return self.settings.trainer.dtype_bytes

    @property
    def has_ragged_kernel(self) -> bool:
        """Whether attention pads nothing and takes no masks (parallel/attention_calls.py, has_ragged_kernel)."""
        return self.machine.device is not None and self.settings.trainer.dtype == "bf16"

    @cached_property
    def heads(self) -> HeadsShape | None:
        """The draft heads of the run."""
        return HeadsShape.if_enabled(self.settings.medusa, self.shapes[Role.ACTOR])

    def has(self, role: Role) -> bool:
        """Whether the role's states are on these devices."""
        return self.only is None or role in self.only

    def states(self, pipeline_stage: int) -> dict[Role, RoleBytes]:
        """Bytes of each role on one rank of a pipeline stage: the first copy's, whose share of the optimizer is as large as any."""
        parallel = self.settings.parallel
        place = Place(parallel.tensor, parallel.pipeline, pipeline_stage, self.copies, virtual=parallel.virtual_pipeline)
        key = place, parallel.distributed_optimizer
        if key not in self.sizes:
            self.sizes[key] = planned_bytes(self.settings, role_paths(self.settings), place)
        return {role: size for role, size in self.sizes[key].items() if self.has(role)}

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of an iteration in their order, of those that this run has."""
        trainer, stages = self.settings.trainer, []
        for number, visit in enumerate(planned_visits(self.settings, role_paths(self.settings))):
            if number == 0 and trainer.generates:
                stages.append(Stage("sync", "sync weights", visit))
            elif visit.role is None and trainer.generates:
                stages.append(Stage("generate", "generate", visit))
            elif visit.role is not None and number > 0:
                stages += self._pass(visit)
        return [stage for stage in stages if self.has(Role.ACTOR if stage.role is None else stage.role)]

    def _pass(self, visit: Visit) -> list[Stage]:
        """Scoring or training."""
        trainer = self.settings.trainer
        trains = any(Part.GRADS in claim.parts for claim in visit.claims())
        if not trains:
            return [Stage("score", f"score {visit.role.value}", visit)] if trainer.generates else []
        if not trainer.trains and trainer.mode != "heads":
            return []
        name = "draft heads" if visit.parts != TRAINING else visit.role.value
        return [Stage("train", f"train {name}", visit)]

    def micro_batch_tokens(self, stage: Stage) -> int:
        """Tokens of a micro-batch, of all context ranks together: what its budget says, but no more than a data-parallel rank has."""
        section = getattr(self.settings, stage.role.value)
        budget: MicroBatch = section.micro_batch if stage.kind == "train" else section.scoring_micro_batch
        tokens = budget.tokens or budget.sequences * self.workload.longest
        sequences = self.settings.mini_batch_sequences if stage.kind == "train" else self.workload.sequences
        return min(tokens, -(-sequences // self.data) * self.workload.longest)

    def tokens(self, stage: Stage) -> Tokens:
        """What a rank has of a full micro-batch."""
        tokens, work, context = self.micro_batch_tokens(stage), self.workload, self.settings.parallel.context
        alone = 2 * work.longest > tokens  # one sequence fills it, and its kernel call has no padding
        last_only = stage.role is Role.REWARD
        share = work.response / work.length
        answers = max(1, tokens // work.longest) if last_only else round(tokens * share)
        multiple = self.settings.parallel.tensor * context
        tokens = -(-tokens // multiple) * multiple
        longest = min(work.longest, tokens)
        if self.has_ragged_kernel:
            return Tokens.end_to_end(tokens, longest, answers, context)
        window = self.shapes[stage.role].sliding_window
        return Tokens.even(tokens, longest, answers, context, 1.0 if alone else self.assumed.padding, window)

    def layers(self, stage: Stage, pipeline_stage: int) -> Layers:
        """What decides the activations of the stage's role on a rank; of one chunk, where it has several."""
        parallel, shape = self.settings.parallel, self.shapes[stage.role]
        return Layers(
            shape=shape,
            tensor=parallel.tensor,
            layers=shape.num_layers // (parallel.pipeline * self.chunks),
            is_first=pipeline_stage == 0,
            is_last=pipeline_stage == parallel.pipeline - 1,
            value_head=stage.role in VALUE_ROLES,
            dtype_bytes=self.dtype_bytes,
            recompute=self.settings.trainer.recompute if stage.kind == "train" else "none",
            banned=self.settings.rollout.min_tokens > 0,
            expands_keys=self.machine.device is not None and not self.has_ragged_kernel and shape.num_kv_heads < shape.num_heads,
        )

    def resident(self) -> set[tuple[Role, Part]]:
        """What is on the device whatever the stage."""
        roles = {"time_sharing": (), "forward_offload": TRAINED_ROLES, "resident": tuple(Role)}[self.placement]
        return {(role, part) for role in roles for part in TRAINING}
