"""Start: all that a run of PPO, or of draft heads alone, is made of, built once and in an order that shows bad input before heavy work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.checkpoint import Origin, Saving, check_same_run, find_origin, identity
from rlhf_mc.config import Settings
from rlhf_mc.data import Encoder, PretrainText, PromptSource, check_same_vocabulary, load_tokenizer, read_rows
from rlhf_mc.medusa.drafter import DraftModel
from rlhf_mc.medusa.drafting import Drafting
from rlhf_mc.medusa.files import check_heads
from rlhf_mc.medusa.hidden_states import HiddenStates
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.heads import Sampling
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.optimizer import kernels_in_use
from rlhf_mc.models.role import RoleModel, build_role
from rlhf_mc.models.roles import TRAINED_ROLES, Role, role_paths
from rlhf_mc.offload import ModelState, Residency, plan_residency
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.job import Bridge, Job
from rlhf_mc.parallel.world import World, join_job
from rlhf_mc.pipeline.control import Control, ReplicaLoad
from rlhf_mc.pipeline.dispatch import ResponseLengths
from rlhf_mc.pipeline.engine import Engine
from rlhf_mc.pipeline.engine_limits import check_memory, check_settings, stop_token_ids
from rlhf_mc.pipeline.nccl_wire import wire_over
from rlhf_mc.pipeline.sampler import ColocatedSampler, Sampler, SeparateSampler
from rlhf_mc.pipeline.schedule import Costs
from rlhf_mc.pipeline.weight_sync import plan_sync_apart, plan_weight_sync, probe_sequence
from rlhf_mc.reliability import Guard, StopAsked, StopRequest, Watchdog
from rlhf_mc.rewards.confinement import Confinement
from rlhf_mc.rewards.pool import RewardPool
from rlhf_mc.rollout_files import BackgroundWriter, check_replay
from rlhf_mc.stages.draft_heads import build_heads
from rlhf_mc.tracking import StageClock, Trace, Tracker


@dataclass(frozen=True)
class Sources:
    """Where rows come from: prompts to answer, held-out prompts, text for the ptx loss; None what this run does not read."""

    prompts: PromptSource | None
    validation: PromptSource | None
    ptx: PretrainText | None

    def report(self, tracker: Tracker) -> None:
        """Says how many prompts there are, and which were dropped for their length."""
        if self.prompts is not None:
            tracker.say(f"data.train: {self.prompts.report}")
        if self.validation is not None:
            tracker.say(f"data.validation: {self.validation.report}")


@dataclass(frozen=True)
class Boundary:
    """What a run is after an iteration, beside its weights, which do not change before the next update. lengths: a copy.

    drafting: its state.  generators: the random generators of this rank.
    """

    weight_version: int
    kl_coef: float
    lengths: ResponseLengths
    drafting: dict[str, Any]
    costs: Costs | None
    generators: dict[str, Any]
    metrics: dict[str, float]


@dataclass
class Run:
    """One run on this rank. What changes from iteration to iteration: all from kl on, and what the models hold.

    roles: the models by role; the reward model is absent where only functions pay, and with the reference where the run
    makes no experience: then reward_pool is empty. The critic is absent where only draft heads are trained.
    sampler: None where the run generates nothing.
    origin: where the run begins.  identity: hashes of models and data, where it saves or goes on.  before: the first evaluation.
    drafter: the actor's draft heads, None without.  drafting: how many tokens the engines draft.
    sampling: how the engine draws tokens, for the trainer's log-probs.  weight_version: updates of the actor or its heads so far.
    probe_seconds: what the trainer's pass over the probe took.  costs: what making the last experience took.
    lengths: of earlier responses.  loads: what each replica did in the last rollout.  hidden: what the heads train on next.
    bridge: to engines on ranks of their own.  stop: whether this rank was asked to stop.
    guard: counts the updates that were skipped.
    done: iterations that are done.  boundary: what the run was after them, but for its weights.  updated: these are another iteration's.
    saving: the checkpoint that is being written.  saved: iterations that the newest one, written or begun, has.
    """

    settings: Settings
    world: World
    tracker: Tracker
    clock: StageClock
    trace: Trace
    tokenizer: PreTrainedTokenizerBase
    sources: Sources
    roles: dict[Role, RoleModel]
    residency: Residency
    sampler: Sampler | None
    reward_pool: RewardPool
    dump_writer: BackgroundWriter
    checkpoint_writer: BackgroundWriter
    sampling: Sampling
    drafter: DraftModel | None
    origin: Origin
    identity: dict[str, str]
    drafting: Drafting
    bridge: Bridge | None
    stop: StopRequest
    guard: Guard
    kl: KLController
    before: dict[str, float] = field(default_factory=dict)
    weight_version: int = 0
    probe_seconds: float = 0.0
    costs: Costs | None = None
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    loads: list[ReplicaLoad] = field(default_factory=list)
    hidden: HiddenStates | None = None
    done: int = 0
    updated: bool = False
    boundary: Boundary | None = None
    saving: Saving | None = None
    saved: int = 0

    @property
    def actor(self) -> RoleModel:
        """The policy."""
        return self.roles[Role.ACTOR]

    @property
    def critic(self) -> RoleModel:
        """The value model, where there is one."""
        return self.roles[Role.CRITIC]

    @property
    def trained(self) -> list[Role]:
        """Of the four models, those that this run trains."""
        return [role for role in TRAINED_ROLES if role in self.roles] if self.settings.trainer.trains else []

    @property
    def trains_heads(self) -> bool:
        """Whether the draft heads learn from each rollout."""
        return self.drafter is not None and self.drafter.optimizer is not None

    def safe_point(self) -> None:
        """Collective over all ranks. Here the run may be left, unless an update was made since the last boundary.

        Raises StopAsked on every rank where any was asked to stop.
        """
        self.clock.progress()
        if not self.updated and self.world.any_rank(self.stop.asked):
            raise StopAsked

    def device_for_sampler(self) -> AbstractContextManager[None]:
        """Inside, an engine that shares this rank's device has it for itself."""
        return self.residency.nobody_on_device() if self.sampler.shares_devices else nullcontext()


def read_sources(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Sources:
    """Reads and encodes all rows. Raises ConfigError for what cannot be read. Alike on every rank; no collective."""
    data, trainer, encoder = settings.data, settings.trainer, Encoder(tokenizer, chat_template=settings.data.chat_template)

    def prompts(key: str, files: list[str]) -> PromptSource:
        return PromptSource(
            read_rows(files, key),
            encoder,
            prompts_per_iteration=data.prompts_per_iteration,
            max_prompt_tokens=data.max_prompt_tokens,
            seed=trainer.seed,
            shuffle=data.shuffle,
        )

    train = prompts("data.train", data.train) if trainer.generates else None
    validation = prompts("data.validation", data.validation) if data.validation and trainer.evaluates else None
    ptx = None
    if settings.actor.ptx_coef and trainer.trains:
        ptx = PretrainText(
            read_rows(data.ptx, "data.ptx"),
            encoder,
            batch_size=settings.mini_batch_sequences,
            max_tokens=settings.longest_sequence,
            seed=trainer.seed,
            shuffle=data.shuffle,
        )
    return Sources(train, validation, ptx)


def check_models(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a model that cannot be split or sampled as asked, or whose vocabulary is not the actor's.

    Reads no weights; no collective.
    """
    actor = read_shape(settings.actor.path, "actor.path")
    if settings.trainer.generates:
        check_settings(actor, settings.rollout, settings.trainer.dtype, settings.data.max_prompt_tokens)
    if settings.medusa.enabled and settings.medusa.path:
        check_heads(settings.medusa.path, settings.medusa, actor)
    for role, path in role_paths(settings).items():
        key = f"{role.value}.path"
        read_shape(path, key).check_layout(settings.parallel, key)
        if path != settings.actor.path:
            other = load_tokenizer(path, settings.trainer.trust_remote_code)
            check_same_vocabulary(tokenizer, other, "actor.path", key)


def checkpoints_of(settings: Settings) -> Path:
    """Where the checkpoints of a run are."""
    return Path(settings.trainer.output_dir, "checkpoints")


def _find_origin(settings: Settings, world: World) -> tuple[Origin, dict[str, str]]:
    """Collective over all ranks. Where the run begins, and the hashes of its models and data; {} where it has no use for them.

    Raises ConfigError on every rank where the newest checkpoint that is whole is of another run.
    """
    trainer = settings.trainer
    origin = find_origin(world, checkpoints_of(settings), trainer.resume, trainer.iterations)
    if origin.snapshot is None and not trainer.save_every:
        return origin, {}
    sources = {f"{role.value}.path": [path] for role, path in role_paths(settings).items()}
    sources |= {"data.train": settings.data.train, "data.ptx": settings.data.ptx}
    sources["medusa.path"] = [settings.medusa.path] if settings.medusa.path else []
    found = identity(world, sources)
    if origin.snapshot is not None:
        check_same_run(origin.snapshot, settings, found)
    return origin, found


def _build_roles(
    settings: Settings, world: World, tracker: Tracker, trace: Trace
) -> tuple[dict[Role, RoleModel], DraftModel | None, Residency]:
    """Collective over all ranks. Each role goes to the host as soon as it is built, so that the device never holds two; but draft heads
    are built beside the actor.
    """
    trained = {Role.ACTOR: settings.actor.optim, Role.CRITIC: settings.critic.optim} if settings.trainer.trains else {}
    roles: dict[Role, RoleModel] = {}
    drafter = None
    residency = plan_residency(settings, role_paths(settings), world, trace)
    for role, path in role_paths(settings).items():
        tracker.say(f"{role.value}: weights from {path}")
        head = "value" if role in (Role.CRITIC, Role.REWARD) else "language"
        roles[role] = build_role(role, head, path, settings, world, trained.get(role))
        if role is Role.ACTOR and settings.medusa.enabled:
            drafter = build_heads(settings, roles[role], settings.trains_heads, tracker.say)
            residency.adopt(ModelState.of(drafter))
        residency.adopt(ModelState.of(roles[role]))
    return roles, drafter, residency


def _build_sampler(
    settings: Settings, actor: RoleModel, bridge: Bridge | None, sources: Sources, stops: list[int], trace: Trace
) -> Sampler:
    """Collective over all ranks of the job. The engines, started here or on the other side of the bridge, and the way of the weights to them."""
    world, rollout, longest = actor.world, settings.rollout, settings.data.max_prompt_tokens
    steps, heads = settings.pipeline.steps_per_exchange, HeadsShape.if_enabled(settings.medusa, actor.shape)
    probe = probe_sequence(sources.prompts.batch(0).prompt(0), actor.shape.vocab, longest)
    if bridge is not None:
        grid = RolloutGrid.apart(rollout.engine_ranks, 0, rollout.tensor_parallel)
        plan = plan_sync_apart(actor.shape, world.grid, grid, actor.dtype.itemsize, heads)
        reshard = Reshard(plan, wire_over(bridge, world.device), world.device, actor.dtype)
        return SeparateSampler(grid, reshard, world, probe, steps, Control(bridge))
    grid = RolloutGrid(world.grid, rollout.tensor_parallel)
    engine = Engine(settings.actor.path, rollout, settings.trainer.dtype, grid, settings.trainer.seed, longest, stops, heads)
    return ColocatedSampler(grid, plan_weight_sync(actor, grid, heads), world, probe, steps, engine, trace)


def _open_tracker(settings: Settings, world: World, origin: Origin) -> Tracker:
    """A run that has checkpoints writes on where the one that it goes on from stopped, in files and in wandb; another one appends."""
    trainer, snapshot = settings.trainer, origin.snapshot
    start = origin.iteration if snapshot or trainer.save_every else None
    tracker = Tracker(settings, world.rank, trainer.iterations, start, snapshot and snapshot.record["wandb_run_id"])
    for message in origin.messages:
        tracker.say(message)
    return tracker


def _say_mode(settings: Settings, tracker: Tracker) -> None:
    """What a run that is not a whole PPO leaves out."""
    without = {
        "rollout": "experience is written to files; nothing is trained or evaluated",
        "update": f"trains on {settings.rollout.replay_dir}; no engine, reference or rewards, no evaluation",
        "heads": "trains the draft heads on samples of the actor, which stays as it is; no reference, critic or rewards, no evaluation",
    }
    mode = settings.trainer.mode
    if mode in without:
        tracker.say(f"trainer.mode={mode}: {without[mode]}")


def _open_reward_pool(settings: Settings, trace: Trace) -> RewardPool:
    """The workers of the reward functions, which have imported them; none where the run makes no experience."""
    reward = settings.reward
    functions = reward.functions if settings.trainer.makes_experience else []
    confinement = Confinement(None if reward.memory_gib is None else int(reward.memory_gib * 2**30), reward.network)
    return RewardPool(functions, reward.num_workers, reward.timeout_seconds, reward.max_error_rate, trace, confinement)


def watchdog_of(settings: Settings, rank: int, clock: StageClock, trace: Trace, beat: Callable[[], None]) -> Watchdog:
    """Of a rank that trains. beat: called as long as the rank lives."""
    stacks = Path(settings.trainer.output_dir, "stacks", f"rank{rank:05d}.txt")
    return Watchdog(settings.watchdog, rank, clock.waiting, trace.last, stacks, beat)


@contextmanager
def start_ppo(settings: Settings, job: Job) -> Iterator[Run]:
    """Collective over all ranks of the job, of which this is one that trains, once models, data and reward functions were checked.

    The run, closed at the end: trace, engine, trackers, reward workers, the writer of dumps. A run that fails leaves its trace.
    """
    rollout, trainer = settings.rollout, settings.trainer
    tokenizer = load_tokenizer(settings.actor.path, trainer.trust_remote_code)
    check_models(settings, tokenizer)
    if not trainer.generates:
        check_replay(settings)
    stops = stop_token_ids(settings.actor.path, tokenizer.eos_token_id)
    sources = read_sources(settings, tokenizer)
    trace = Trace(trainer.trace_iterations)
    with ExitStack() as stack:
        pool = stack.enter_context(_open_reward_pool(settings, trace))
        world, bridge = join_job(settings, job)
        stop = StopRequest.that_listens()
        if trainer.generates and bridge is None:
            check_memory(rollout, RolloutGrid(world.grid, rollout.tensor_parallel))
        origin, hashes = _find_origin(settings, world)
        tracker = stack.enter_context(_open_tracker(settings, world, origin))
        _say_mode(settings, tracker)
        sources.report(tracker)
        engines = f" and {job.num_engines} for engines" if job.num_engines else ""
        tracker.say(f"{world.size} ranks{engines} on {world.device.type}, {trainer.dtype}; {kernels_in_use(world.device)}")
        roles, drafter, residency = _build_roles(settings, world, tracker, trace)
        sampler = None
        if trainer.generates:
            tracker.say("engine: starting vLLM")
            sampler = stack.enter_context(_build_sampler(settings, roles[Role.ACTOR], bridge, sources, stops, trace))
            tracker.say(f"weight sync: {sampler.plan.explanation()}")
        clock = StageClock(world.device, trace)
        stack.enter_context(watchdog_of(settings, world.rank, clock, trace, tracker.beat))
        # Closed first: after a failure, torchrun ends this rank soon, and an engine may hang.
        stack.callback(trace.write, Path(trainer.output_dir, "trace", f"rank{world.rank}.json"), world.rank)
        yield Run(
            settings=settings,
            world=world,
            tracker=tracker,
            clock=clock,
            trace=trace,
            tokenizer=tokenizer,
            sources=sources,
            roles=roles,
            residency=residency,
            sampler=sampler,
            reward_pool=pool,
            dump_writer=stack.enter_context(BackgroundWriter()),
            checkpoint_writer=stack.enter_context(BackgroundWriter()),
            sampling=Sampling(rollout.temperature, rollout.min_tokens, tuple(stops)),
            drafter=drafter,
            origin=origin,
            identity=hashes,
            bridge=bridge,
            stop=stop,
            guard=Guard(settings.guard),
            done=origin.iteration,
            saved=origin.iteration,
            drafting=Drafting(settings.medusa.num_heads if drafter is not None else 0, settings.medusa.drafted_tokens),
            kl=KLController.from_settings(settings.algorithm.kl),
        )
