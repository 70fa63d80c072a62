"""Every setting of every program: typed, in one place, checked before any process group exists.

Each default has its one home here, with the meaning of its key behind `#:`, from which `config_keys.py` makes
docs/configuration.md. `recipe.py` reads YAML files and the command line into these records. Checks that need only
settings are here; checks that need a model's config.json are in `models/hf_config.py`. Nothing mutates a Settings
object. Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from rlhf_mc.contradictions import contradictions

Program = Literal["train", "sft", "reward_model", "heads"]
Recompute = Literal["none", "selective", "full"]
MOST_HEADS = 128  # vLLM's MAX_SPEC_LEN
_ROLLOUT_FILE = "{:06d}.jsonl"


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, the value and the fix."""


_settings_record = dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def refuse(errors: Sequence[str]) -> None:
    """One ConfigError that lists all `errors`; nothing where there are none."""
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigError("\n  ".join([f"{len(errors)} settings are wrong:", *errors]))


@_settings_record
class MicroBatch:
    """How many sequences go through a model at once, by packed tokens or by count; exactly one of the two is set.

    Sequences are never split: a sequence longer than `tokens` is an error that names it.
    """

    tokens: int | None = 4096  #: packed tokens of one micro-batch at most; null: count sequences
    sequences: int | None = None  #: sequences of one micro-batch; null: count tokens

    def check(self, key: str) -> None:
        _check(
            (self.tokens is None) != (self.sequences is None),
            f"{key}: set exactly one of tokens ({self.tokens}) and sequences ({self.sequences}); put null for the other",
        )
        size = self.tokens if self.sequences is None else self.sequences
        _check(size >= 1, f"{key}: {size} is not a positive size")


@_settings_record
class Optim:
    """AdamW with decoupled weight decay, linear warm-up, then the schedule down to `min_lr`."""

    lr: float = 1e-6  #: peak learning rate
    min_lr: float = 0.0  #: where the schedule ends
    schedule: Literal["constant", "linear", "cosine"] = "constant"  #: shape after the warm-up
    warmup_steps: int = 0  #: optimizer steps of linear warm-up from 0
    weight_decay: float = 0.0  #: decoupled weight decay; none of norms and biases
    beta1: float = 0.9  #: decay of the first moment
    beta2: float = 0.95  #: decay of the second moment
    eps: float = 1e-8  #: added to the root of the second moment
    clip_grad: float = 1.0  #: largest global gradient norm

    def check(self, key: str) -> None:
        _check(self.lr >= 0, f"{key}.lr: {self.lr} is negative")
        _check(0 <= self.min_lr <= self.lr, f"{key}.min_lr: {self.min_lr} must lie between 0 and {key}.lr = {self.lr}")
        _check(self.warmup_steps >= 0, f"{key}.warmup_steps: {self.warmup_steps} is negative")
        _check(self.clip_grad > 0, f"{key}.clip_grad: {self.clip_grad} must be positive; a large number switches clipping off")


@_settings_record
class Parallel:
    """The training grid. Data-parallel size is world size / (tensor x context x pipeline)."""

    tensor: int = 1  #: ranks that share each layer
    context: int = 1  #: ranks that share each sequence; micro_batch.tokens counts the tokens of all of them
    pipeline: int = 1  #: ranks that share the stack of layers
    virtual_pipeline: int = 1  #: chunks of layers on each of these; micro-batches go around as often (interleaved 1F1B)
    distributed_optimizer: bool = True  #: shard main params and moments over the ranks with the same weights

    def check(self, key: str) -> None:
        _check(self.tensor >= 1, f"{key}.tensor: {self.tensor} is not positive")
        _check(self.context >= 1, f"{key}.context: {self.context} is not positive")
        _check(self.pipeline >= 1, f"{key}.pipeline: {self.pipeline} is not positive")
        _check(self.virtual_pipeline >= 1, f"{key}.virtual_pipeline: {self.virtual_pipeline} is not positive")
        _check(
            self.virtual_pipeline == 1 or self.pipeline > 1,
            f"{key}.virtual_pipeline: {self.virtual_pipeline} chunks take turns on the ranks of a pipeline, and {key}.pipeline is 1; "
            f"set {key}.virtual_pipeline=1, or raise {key}.pipeline",
        )

    def data(self, num_ranks: int, engine_ranks: int = 0) -> int:
        """Data-parallel size for `num_ranks` ranks that train, beside those of the engines; an indivisible layout is a ConfigError."""
        group = self.ranks_of_a_sequence
        more = f", and rollout.engine_ranks {engine_ranks} more" if engine_ranks else ""
        _check(
            num_ranks % group == 0,
            f"parallel: {num_ranks} ranks cannot be divided into groups of tensor {self.tensor} x context {self.context} x pipeline "
            f"{self.pipeline} = {group}; start a multiple of {group} ranks{more}, "
            "or lower parallel.tensor, parallel.context or parallel.pipeline",
        )
        return num_ranks // group

    @property
    def ranks_of_a_sequence(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor * self.context * self.pipeline


@_settings_record
class Actor:
    """The policy. `path` is a local Hugging Face directory; the reference starts from the same weights unless named."""

    path: str | None = None  #: Hugging Face directory of the policy
    optim: Optim = Optim()
    micro_batch: MicroBatch = MicroBatch()
    scoring_micro_batch: MicroBatch = MicroBatch(tokens=16384)
    clip_ratio_low: float = 0.2  #: the ratio is clipped below 1 minus this
    clip_ratio_high: float = 0.2  #: the ratio is clipped above 1 plus this
    dual_clip: float | None = 3.0  #: bound of the ratio where the advantage is negative; null: none
    entropy_coef: float = 0.0  #: weight of the entropy bonus
    ptx_coef: float = 0.0  #: weight of the language-model loss on data.ptx

    def check(self, key: str) -> None:
        self.optim.check(f"{key}.optim")
        self.micro_batch.check(f"{key}.micro_batch")
        self.scoring_micro_batch.check(f"{key}.scoring_micro_batch")
        _check(0 < self.clip_ratio_low < 1, f"{key}.clip_ratio_low: {self.clip_ratio_low} must lie between 0 and 1")
        _check(self.clip_ratio_high > 0, f"{key}.clip_ratio_high: {self.clip_ratio_high} must be positive")
        _check(
            self.dual_clip is None or self.dual_clip > 1,
            f"{key}.dual_clip: {self.dual_clip} must exceed 1 (arXiv:1912.09729), or be null for none",
        )
        _check(self.ptx_coef >= 0, f"{key}.ptx_coef: {self.ptx_coef} is negative")


@_settings_record
class Critic:
    """The value model. `path` null starts it from the reward model."""

    path: str | None = None  #: Hugging Face directory of the value model; null: reward_model.path
    optim: Optim = Optim(lr=1e-5)
    micro_batch: MicroBatch = MicroBatch()
    scoring_micro_batch: MicroBatch = MicroBatch(tokens=16384)
    value_clip: float | None = 0.2  #: values move at most this far from the old ones in an update; null: no clip
    warmup_iterations: int = 0  #: first iterations that train the critic only

    def check(self, key: str) -> None:
        self.optim.check(f"{key}.optim")
        self.micro_batch.check(f"{key}.micro_batch")
        self.scoring_micro_batch.check(f"{key}.scoring_micro_batch")
        _check(self.value_clip is None or self.value_clip > 0, f"{key}.value_clip: {self.value_clip} must be positive or null")
        _check(self.warmup_iterations >= 0, f"{key}.warmup_iterations: {self.warmup_iterations} is negative")


@_settings_record
class Reference:
    """The frozen policy that the KL is measured from. `path` null means the actor's path."""

    path: str | None = None  #: Hugging Face directory of the reference; null: actor.path
    scoring_micro_batch: MicroBatch = MicroBatch(tokens=16384)

    def check(self, key: str) -> None:
        self.scoring_micro_batch.check(f"{key}.scoring_micro_batch")


@_settings_record
class RewardModel:
    """A frozen scorer with a scalar head. `path` null means no reward model: then reward.functions must pay."""

    path: str | None = None  #: Hugging Face directory of the reward model; null: none
    weight: float = 1.0  #: weight of its score in the sum of all scores
    scoring_micro_batch: MicroBatch = MicroBatch(tokens=16384)

    def check(self, key: str) -> None:
        self.scoring_micro_batch.check(f"{key}.scoring_micro_batch")


@_settings_record
class RewardFunction:
    """One Python reward function, `package.module:function` or `file.py:function`.

    `data_source` null means rows of every source. `weight` 0 measures without paying.
    """

    path: str  #: package.module:function or file.py:function
    name: str | None = None  #: name in the metrics; null: the function's own
    weight: float = 1.0  #: weight of its score in the sum; 0: measured only
    data_source: str | None = None  #: rows it scores, by their data_source; null: all rows
    arguments: dict[str, Any] = field(default_factory=dict)  #: keyword arguments of every call

    @property
    def label(self) -> str:
        """Name in metrics: `name`, or the function's own."""
        return self.name or self.path.rpartition(":")[2]


@_settings_record
class Reward:
    """Rule-based rewards and the pool of processes that runs them."""

    functions: list[RewardFunction] = field(default_factory=list)  #: one entry for each function
    num_workers: int = 1  #: worker processes that run the functions
    timeout_seconds: float = 10.0  #: time for one call; then its worker is killed
    memory_gib: float | None = None  #: address space of a worker, libraries included; null: no limit
    network: bool = True  #: false: workers cannot reach the network, where the host allows to take it away
    max_error_rate: float = 0.1  #: share of failed calls above which the run stops
    truncated: Literal["score", "penalise", "mask"] = "score"  #: what a response cut at rollout.max_tokens gets
    truncation_penalty: float = -1.0  #: what truncated=penalise adds to its score

    def check(self, key: str) -> None:
        _check(self.num_workers >= 1, f"{key}.num_workers: {self.num_workers} is not positive")
        _check(self.timeout_seconds > 0, f"{key}.timeout_seconds: {self.timeout_seconds} is not positive")
        _check(
            self.memory_gib is None or self.memory_gib > 0,
            f"{key}.memory_gib: {self.memory_gib} is not positive; a worker takes about 0.2, null sets no limit",
        )
        _check(0 <= self.max_error_rate <= 1, f"{key}.max_error_rate: {self.max_error_rate} must lie between 0 and 1")
        labels = [f.label for f in self.functions]
        repeated = sorted({x for x in labels if labels.count(x) > 1})
        _check(not repeated, f"{key}.functions: the name {', '.join(repeated)} is used twice; give each function its own `name`")
        _check("reward_model" not in labels, f"{key}.functions: the name reward_model is the reward model's; give another `name`")
        for f in self.functions:
            _check(":" in f.path, f"{key}.functions: path '{f.path}' must read package.module:function or file.py:function")


@_settings_record
class Rollout:
    """Sampling by vLLM on a grid of its own: the ranks form replicas of `tensor_parallel` ranks each.

    Colocated engines share processes and devices with the trainer, by turns. Separate ones have the last `engine_ranks` ranks
    of the job to themselves, and decode while the others score.
    """

    placement: Literal["colocated", "separate"] = "colocated"  #: engines in the trainer's processes, or in processes of their own
    engine_ranks: int = 0  #: with placement=separate, ranks at the end of the job that only run engines
    tensor_parallel: int = 1  #: ranks of one replica; divides engine_ranks, or colocated parallel.tensor x pipeline
    samples_per_prompt: int = 1  #: responses to each prompt
    temperature: float = 1.0  #: of sampling, and of every log-prob
    min_tokens: int = 0  #: shortest response
    max_tokens: int = 128  #: longest response
    top_p: float = 1.0  #: must stay 1.0: PPO trains on the full softmax
    top_k: int = -1  #: must stay -1: PPO trains on the full softmax
    max_running_sequences: int = 64  #: sequences that an engine decodes at once
    kv_cache_gib: float = 1.0  #: KV cache of each rank, GiB
    enforce_eager: bool = True  #: run without CUDA graphs
    dump: bool = False  #: write each iteration's experience to trainer.output_dir/rollouts
    replay_dir: str | None = None  #: rollouts directory of another run, for trainer.mode=update; null: none

    def check(self, key: str) -> None:
        _check(self.tensor_parallel >= 1, f"{key}.tensor_parallel: {self.tensor_parallel} is not positive")
        self._check_placement(key)
        _check(self.samples_per_prompt >= 1, f"{key}.samples_per_prompt: {self.samples_per_prompt} is not positive")
        _check(self.temperature > 0, f"{key}.temperature: {self.temperature} must be positive; only evaluation decodes greedily")
        _check(
            self.top_p == 1.0 and self.top_k == -1,
            f"{key}: top_p={self.top_p}, top_k={self.top_k} would sample from another distribution than the one that is trained, "
            "and break the ratio; set top_p=1.0 and top_k=-1 and use temperature",
        )
        _check(
            0 <= self.min_tokens <= self.max_tokens and self.max_tokens >= 1,
            f"{key}: need 0 <= min_tokens ({self.min_tokens}) <= max_tokens ({self.max_tokens}) and max_tokens >= 1",
        )
        _check(self.kv_cache_gib > 0, f"{key}.kv_cache_gib: {self.kv_cache_gib} is not positive")

    def _check_placement(self, key: str) -> None:
        ranks, replica = self.engine_ranks, self.tensor_parallel
        if self.placement == "colocated":
            _check(
                ranks == 0,
                f"{key}.engine_ranks: {ranks}, but {key}.placement: colocated has engines on the trainer's ranks; "
                f"set {key}.placement=separate, or {key}.engine_ranks=0",
            )
            return
        _check(
            ranks >= 1,
            f"{key}.engine_ranks: {ranks}, but {key}.placement: separate needs ranks for the engines; "
            f"set {key}.engine_ranks={replica} or a multiple of it, and start as many ranks more",
        )
        _check(
            ranks % replica == 0,
            f"{key}.engine_ranks: {ranks} cannot be divided into replicas of {key}.tensor_parallel {replica}; "
            f"set {key}.engine_ranks={ranks // replica * replica or replica}, or change {key}.tensor_parallel",
        )


@_settings_record
class Pipeline:
    """Generating, rewarding and scoring of one rollout: one after the other, or as far as possible side by side."""

    mode: Literal["serial", "pipelined"] = "pipelined"  #: pipelined: reward functions and scoring begin before the rollout is complete
    chunks: int | None = None  #: parts that a rollout is cut into; null: chosen from the costs of earlier iterations
    chunk_by: Literal["prompts", "finished"] = "prompts"  #: neighbouring prompts, or the samples that finish first
    score_while_generating: bool = False  #: score between engine steps on a shared device too; it must hold a role beside the engine
    steps_per_exchange: int = 16  #: engine steps after which the ranks tell each other what has finished

    def check(self, key: str) -> None:
        _check(self.chunks is None or self.chunks >= 1, f"{key}.chunks: {self.chunks} is not positive; null: chosen from measured costs")
        _check(self.steps_per_exchange >= 1, f"{key}.steps_per_exchange: {self.steps_per_exchange} is not positive")


@_settings_record
class KL:
    """Distance to the reference: in the reward (k1, fixed or adaptive) or as a loss (k2 or k3), or none.

    Estimators: http://joschu.net/blog/kl-approx.html. `target` null keeps the coefficient fixed; else it follows
    the proportional controller of arXiv:1909.08593.
    """

    use: Literal["reward", "loss", "none"] = "reward"  #: subtract KL from the reward, add it to the loss, or neither
    estimator: Literal["k1", "k2", "k3"] = "k1"  #: k1 for the reward; k2 or k3 for the loss
    coef: float = 0.05  #: weight of the KL, at the start where target is set
    target: float | None = None  #: KL that the coefficient steers to; null: fixed coefficient
    horizon: int = 10000  #: sequences over which the controller acts

    def check(self, key: str) -> None:
        if self.use == "reward":
            _check(self.estimator == "k1", f"{key}.estimator: {self.estimator} is for {key}.use=loss; KL in the reward uses k1")
        if self.use == "loss":
            _check(
                self.estimator in ("k2", "k3"),
                f"{key}.estimator: k1 as a loss has a zero-mean gradient (it does not pull); use k2 or k3, or {key}.use=reward",
            )
        _check(self.coef >= 0, f"{key}.coef: {self.coef} is negative")
        _check(self.target is None or self.target > 0, f"{key}.target: {self.target} must be positive; null: fixed coefficient")
        _check(self.horizon > 0, f"{key}.horizon: {self.horizon} is not positive")
        if self.target is not None:
            _check(self.use != "none", f"{key}.target: {self.target} steers nothing under {key}.use=none; set {key}.target=null")
            _check(self.coef > 0, f"{key}.coef: the controller of {key}.target multiplies it, so 0 stays 0; start above 0")


@_settings_record
class Algorithm:
    """PPO's own numbers. One iteration makes one rollout; it is used `epochs` times in mini-batches of sequences."""

    advantages: Literal["gae", "grpo", "rloo"] = "gae"  #: gae: of tokens, by a critic; grpo, rloo: of samples, against the others of their prompt
    gamma: float = 1.0  #: discount per token; of gae
    lam: float = 0.95  #: lambda of GAE (arXiv:1506.02438)
    whiten_advantages: bool = True  #: gae's to zero mean, unit variance over the rollout batch
    epochs: int = 1  #: passes over each rollout batch
    mini_batch_sequences: int | None = None  #: sequences of one optimizer step; null: the whole rollout batch
    kl: KL = KL()

    def check(self, key: str) -> None:
        _check(0 < self.gamma <= 1, f"{key}.gamma: {self.gamma} must lie in (0, 1]")
        _check(0 <= self.lam <= 1, f"{key}.lam: {self.lam} must lie in [0, 1]")
        _check(self.epochs >= 1, f"{key}.epochs: {self.epochs} is not positive")
        _check(
            self.mini_batch_sequences is None or self.mini_batch_sequences >= 1,
            f"{key}.mini_batch_sequences: {self.mini_batch_sequences} is not positive; null takes the whole rollout batch",
        )
        self.kl.check(f"{key}.kl")


@_settings_record
class Data:
    """Where rows come from. Fields of TRL's and verl's formats are read as they are (docs/data.md)."""

    train: list[str] = field(default_factory=list)  #: JSONL or parquet files to train on
    validation: list[str] = field(default_factory=list)  #: files held out for evaluation
    ptx: list[str] = field(default_factory=list)  #: text files for actor.ptx_coef
    prompts_per_iteration: int = 64  #: prompts of one rollout
    max_prompt_tokens: int = 512  #: longer prompts are dropped, and counted
    chat_template: bool = True  #: apply the tokenizer's chat template
    shuffle: bool = True  #: new order each epoch, from trainer.seed

    def check(self, key: str) -> None:
        _check(self.prompts_per_iteration >= 1, f"{key}.prompts_per_iteration: {self.prompts_per_iteration} is not positive")
        _check(self.max_prompt_tokens >= 1, f"{key}.max_prompt_tokens: {self.max_prompt_tokens} is not positive")


@_settings_record
class Supervised:
    """SFT and reward-model training: a plain loop over the training rows."""

    path: str | None = None  #: Hugging Face directory that training starts from
    epochs: int = 1  #: passes over data.train
    max_steps: int | None = None  #: stop after so many steps; null: after the epochs
    batch_size: int = 64  #: rows of one optimizer step; a preference pair is one row
    max_tokens: int = 1024  #: longest row, prompt and response
    optim: Optim = Optim(lr=1e-5, schedule="cosine")
    micro_batch: MicroBatch = MicroBatch()
    evaluate_every: int = 50  #: steps between evaluations on data.validation

    def check(self, key: str) -> None:
        _check(self.epochs >= 1, f"{key}.epochs: {self.epochs} is not positive")
        _check(self.batch_size >= 1, f"{key}.batch_size: {self.batch_size} is not positive")
        self.optim.check(f"{key}.optim")
        self.micro_batch.check(f"{key}.micro_batch")


@_settings_record
class Medusa:
    """Draft heads on the actor (arXiv:2401.10774): trained beside it, used by the engine to guess several tokens ahead.

    docs/medusa.md says how they are trained, and when they pay. In SFT, `joint_weight` null trains the heads alone.
    """

    enabled: bool = False  #: draft heads on the actor, and in the engine
    path: str | None = None  #: directory of trained heads; null: new ones, which guess nothing useful at first
    num_heads: int = 3  #: heads; the k-th guesses the token k + 1 places ahead
    num_layers: int = 1  #: residual blocks of each head
    shared_output: bool = True  #: all heads use the actor's output layer; false: one each
    drafted_tokens: int | None = None  #: tokens drafted a step; null: chosen from measurements, 0: none
    train: bool = True  #: train the heads on each rollout of PPO; false: they stay as they are
    steps: int = 2  #: optimizer steps of the heads in an iteration of PPO
    step_tokens: int = 4096  #: response tokens of one such step, at most
    loss_decay: float = 0.8  #: the loss of head k weighs this to the power k - 1
    joint_weight: float | None = None  #: sft: weight of their loss beside the model's; null: heads alone train
    optim: Optim = Optim(lr=1e-3)

    def check(self, key: str) -> None:
        _check(self.num_heads >= 1, f"{key}.num_heads: {self.num_heads} is not positive; to run without heads set {key}.enabled=false")
        most = MOST_HEADS
        _check(self.num_heads <= most, f"{key}.num_heads: {self.num_heads} is more than the {most} drafted tokens that vLLM takes; lower it")
        _check(self.num_layers >= 1, f"{key}.num_layers: {self.num_layers} is not positive")
        drafted = self.drafted_tokens
        _check(
            drafted is None or 0 <= drafted <= self.num_heads,
            f"{key}.drafted_tokens: {drafted} must lie between 0 and {key}.num_heads = {self.num_heads}; null lets the run choose",
        )
        _check(self.steps >= 1, f"{key}.steps: {self.steps} is not positive; to leave the heads as they are set {key}.train=false")
        _check(self.step_tokens >= 1, f"{key}.step_tokens: {self.step_tokens} is not positive")
        _check(0 < self.loss_decay <= 1, f"{key}.loss_decay: {self.loss_decay} must lie in (0, 1]")
        weight = self.joint_weight
        _check(weight is None or weight > 0, f"{key}.joint_weight: {weight} is not positive; null trains the heads alone")
        self.optim.check(f"{key}.optim")


@_settings_record
class Offload:
    """Time-sharing of the device. `enabled` false keeps every role on the device (it must fit)."""

    enabled: bool = True  #: move roles that wait to host memory
    share_host_copies: bool = False  #: ranks with the same params share their host's copy of them; a reload gathers them
    device_budget_gib: float | None = None  #: GiB of the device for states; within it the next role is prefetched; null: no limit

    def check(self, key: str) -> None:
        budget = self.device_budget_gib
        _check(budget is None or budget > 0, f"{key}.device_budget_gib: {budget} is not positive; null for no limit and no prefetch")
        _check(
            self.enabled or not self.share_host_copies,
            f"{key}.share_host_copies: true has no meaning with {key}.enabled=false, which makes no host copies; set it to false",
        )


@_settings_record
class Trainer:
    """The run as a whole. `device` auto takes CUDA where there is one.

    `mode` rollout makes experience and writes it to files, update trains on those of `rollout.replay_dir`; heads trains draft
    heads alone, and is the default of the program that does (rlhf_mc.stages.heads).
    """

    mode: Literal["ppo", "rollout", "update", "heads"] = "ppo"  #: rollout: only make and dump; update: only train; heads: of stages.heads
    output_dir: str = "runs/default"  #: directory of all that the run writes
    seed: int = 1  #: of everything that is drawn at random
    iterations: int = 100  #: rollouts, each with its update
    device: Literal["auto", "cpu", "cuda"] = "auto"  #: auto: CUDA where there is one
    dtype: Literal["fp32", "bf16"] = "bf16"  #: of parameters and activations; main params are fp32
    deterministic: bool = False  #: sums over ranks in rank order, deterministic kernels; slower
    recompute: Recompute = "none"  #: what the backward of a trained role computes again: nothing, attention, or whole layers
    evaluate_every: int = 0  #: iterations between evaluations; 0: before and after only
    save_every: int = 0  #: train: iterations between checkpoints in output_dir/checkpoints; 0: none
    keep_last: int = 2  #: checkpoints that stay; older ones are removed
    keep_best: int = 0  #: checkpoints that stay for being best by best_by, new or old; 0: only the newest stay
    best_by: str = "val/reward_model"  #: metric of a checkpoint's last iteration, the largest is best; -NAME: the smallest
    export_every: int = 0  #: train: iterations between exports of models to output_dir/exports; 0: only at the end
    resume: Literal["auto", "never"] = "auto"  #: auto: go on from the newest whole checkpoint in output_dir
    num_sample_rows: int = 8  #: rows of the sample table
    trace_iterations: int = 2  #: iterations before the present one kept for output_dir/trace/rank*.json; 0: no traces
    trust_remote_code: bool = False  #: run Python code that a model directory brings

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a parameter or an activation."""
        return {"fp32": 4, "bf16": 2}[self.dtype]

    @property
    def generates(self) -> bool:
        """Whether the run samples: it has an engine, and prompts."""
        return self.mode != "update"

    @property
    def makes_experience(self) -> bool:
        """Whether samples become experience: there are a reference, a critic and rewards to score them."""
        return self.mode in ("ppo", "rollout")

    @property
    def trains(self) -> bool:
        """Whether the run updates actor and critic."""
        return self.mode in ("ppo", "update")

    @property
    def evaluates(self) -> bool:
        """Whether the run measures on held-out prompts, which takes an engine and models that change."""
        return self.generates and self.trains

    def check(self, key: str) -> None:
        _check(self.iterations >= 0, f"{key}.iterations: {self.iterations} is negative")
        _check(self.evaluate_every >= 0, f"{key}.evaluate_every: {self.evaluate_every} is negative; 0: only before and after")
        _check(self.save_every >= 0, f"{key}.save_every: {self.save_every} is negative; 0: no checkpoints")
        _check(self.keep_last >= 1, f"{key}.keep_last: {self.keep_last} leaves no checkpoint; keep 1 or more, or set {key}.save_every=0")
        _check(self.keep_best >= 0, f"{key}.keep_best: {self.keep_best} is negative; 0: only the newest stay")
        _check(self.export_every >= 0, f"{key}.export_every: {self.export_every} is negative; 0: only at the end")
        _check(bool(self.best_by.removeprefix("-")), f"{key}.best_by: '{self.best_by}' names no metric; one of metrics.jsonl will do")
        _check(self.trace_iterations >= 0, f"{key}.trace_iterations: {self.trace_iterations} is negative; 0: no traces")


@_settings_record
class Guard:
    """What an update must hold to; else it is skipped, and the batch written to output_dir/bad_updates (docs/reliability.md)."""

    max_bad_updates: int = 3  #: skipped updates in a row, of one model, that stop the run
    max_score: float = 1e4  #: largest size of a sequence's score
    max_ratio: float = 10.0  #: largest mean ratio of new to old probabilities in a mini-batch
    max_grad_norm: float | None = None  #: largest gradient norm; null: any finite one, which is clipped

    def check(self, key: str) -> None:
        _check(self.max_bad_updates >= 1, f"{key}.max_bad_updates: {self.max_bad_updates} is not positive; 1 stops at the first")
        _check(self.max_score > 0, f"{key}.max_score: {self.max_score} is not positive")
        _check(self.max_ratio > 1, f"{key}.max_ratio: {self.max_ratio} must exceed 1, the ratio of an unchanged policy")
        norm = self.max_grad_norm
        _check(norm is None or norm > 0, f"{key}.max_grad_norm: {norm} is not positive; null for no bound")


@_settings_record
class Watchdog:
    """How long a rank may show no sign of life: no stage, decode exchange or mini-batch ends (docs/reliability.md)."""

    seconds: float | None = 1500.0  #: at least so long in any stage; null: no watchdog
    factor: float = 10.0  #: or so many times the longest wait seen in that stage, if that is longer

    def check(self, key: str) -> None:
        _check(self.seconds is None or self.seconds > 0, f"{key}.seconds: {self.seconds} is not positive; null for no watchdog")
        _check(self.factor >= 1, f"{key}.factor: {self.factor} is below 1, so that a stage could not take as long as it did before")


@_settings_record
class Wandb:
    """Weights & Biases. `auto` is online where an API key is set in the environment, else offline."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"  #: auto: online where an API key is set, else offline
    project: str = "rlhf_mc"  #: project of the run
    name: str | None = None  #: display name; null: chosen by wandb
    group: str | None = None  #: group of runs
    tags: list[str] = field(default_factory=list)  #: tags of the run


@_settings_record
class Settings:
    """All sections. Each program reads those it needs: sft and reward_model read `supervised`, train and heads the rest."""

    trainer: Trainer = field(default_factory=Trainer)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    supervised: Supervised = field(default_factory=Supervised)
    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    reference: Reference = field(default_factory=Reference)
    reward_model: RewardModel = field(default_factory=RewardModel)
    reward: Reward = field(default_factory=Reward)
    rollout: Rollout = field(default_factory=Rollout)
    pipeline: Pipeline = field(default_factory=Pipeline)
    algorithm: Algorithm = field(default_factory=Algorithm)
    medusa: Medusa = field(default_factory=Medusa)
    offload: Offload = field(default_factory=Offload)
    guard: Guard = field(default_factory=Guard)
    watchdog: Watchdog = field(default_factory=Watchdog)
    wandb: Wandb = field(default_factory=Wandb)

    @property
    def num_sequences(self) -> int:
        """Sequences of one rollout."""
        return self.data.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def mini_batch_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.algorithm.mini_batch_sequences or self.num_sequences

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps of one epoch over a rollout."""
        return self.num_sequences // self.mini_batch_sequences

    @property
    def has_critic(self) -> bool:
        """Whether PPO has a value model: advantages against the other samples of a prompt need none."""
        return self.algorithm.advantages == "gae"

    @property
    def trains_heads(self) -> bool:
        """Whether draft heads, if there are any, learn from each rollout."""
        return self.trainer.mode != "rollout" and self.medusa.train

    @property
    def trains_heads_alone(self) -> bool:
        """Whether sft trains draft heads on a frozen model, and not the model with them."""
        return self.medusa.enabled and self.medusa.joint_weight is None

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that any program of these settings can meet; rotary tables have this size."""
        return max(self.data.max_prompt_tokens + self.rollout.max_tokens, self.supervised.max_tokens)

    def num_trainer_ranks(self, program: Program, world_size: int) -> int:
        """Of the job's ranks, those that train: the first ones. ConfigError where the engines leave none."""
        engine_ranks = self.rollout.engine_ranks if program in ("train", "heads") else 0
        _check(
            engine_ranks < world_size,
            f"rollout.engine_ranks: {engine_ranks} of {world_size} ranks leaves none to train on; "
            f"start {engine_ranks + self.parallel.ranks_of_a_sequence} ranks or more, or lower it",
        )
        return world_size - engine_ranks

    @property
    def dumps(self) -> bool:
        """Whether the run writes its experience to files."""
        return self.rollout.dump or self.trainer.mode == "rollout"

    def dump_file(self, iteration: int) -> Path:
        """Where a run that dumps writes the experience of an iteration."""
        return Path(self.trainer.output_dir, "rollouts", _ROLLOUT_FILE.format(iteration))

    def replay_file(self, iteration: int) -> Path:
        """Where trainer.mode=update, which has a rollout.replay_dir, finds the experience of an iteration."""
        return Path(self.rollout.replay_dir, _ROLLOUT_FILE.format(iteration))

    def check(self, program: Program, world_size: int | None = None) -> None:
        """Refuse, in one ConfigError, every contradiction that shows without a file.

        First the sections by themselves, each up to its first fault; then the layout, then what must agree between
        sections. Without a `world_size`, what depends on the number of ranks is left out.
        """
        refuse(list(self._section_errors()))
        data_parallel = None
        if world_size is not None:
            trainer_ranks = self.num_trainer_ranks(program, world_size)
            data_parallel = self.parallel.data(trainer_ranks, world_size - trainer_ranks)
        refuse(list(contradictions(self, program, data_parallel)))

    def _section_errors(self) -> Iterator[str]:
        sections = ((f.name, getattr(self, f.name)) for f in fields(self))
        for key, section in sections:
            try:
                if hasattr(section, "check"):
                    section.check(key)
            except ConfigError as error:
                yield str(error)
