"""vLLM in this rank's process: sampling, weights in, sleep. Only this file, vllm_*.py and nccl_wire.py import vllm.

Every rank makes an Engine; the ranks of one replica then call the same methods with the same arguments, in the same
order: each has a scheduler of its own, and they stay in step because they see the same requests. Who gets which prompt
is in dispatch.py; which weights are sent is the caller's matter.

vLLM is imported when an Engine is made, after the environment that it reads at import is set.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_mc.config import Rollout
from rlhf_mc.medusa.files import write_heads_config
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.medusa.shape import engine_pieces as heads_pieces
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.weight_layout import engine_pieces, hf_shapes
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.reshard import Block, Piece, Shapes
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest
from rlhf_mc.pipeline.engine_limits import GIB, check_memory, check_settings
from rlhf_mc.pipeline.engine_process import agreed_ident, forget_shared_memory_names, rng_kept, torch_threads_kept, vllm_environment
from rlhf_mc.pipeline.kv_cache import BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class EngineError(RuntimeError):
    """The engine cannot do what it was asked for. The message says why, and what to do."""


class WeightUpdate:
    """An update of an engine's weights that is going on: see `Places`. missing: elements of the shard that did not come yet."""

    def __init__(self, llm: LLM, missing: int) -> None:
        self._llm, self.missing = llm, missing

    def places(self, blocks: Sequence[Block]) -> list[Tensor]:
        """For each block the memory that it shall fill."""
        places: list[Tensor] = []
        self._llm.collective_rpc("update_weights", kwargs={"update_info": {"blocks": blocks, "places": places}})
        return places

    def filled(self, blocks: Sequence[Block]) -> None:
        """These blocks lie in their places."""
        self.missing -= sum(block.numel for block in blocks)
        self._llm.collective_rpc("update_weights", kwargs={"update_info": {"blocks": blocks, "filled": True}})


@dataclass(frozen=True)
class Step:
    """One step of the engine.  finished: by number.  running: requests that took part.  tokens: that went through the model.

    checked: drafted tokens of each request that the step checked.  accepted: of each request that had drafts, how many gained it a
    token: none behind the end of its response.
    """

    finished: dict[int, Completion]
    running: int = 0
    tokens: int = 0
    checked: int = 0
    accepted: Sequence[int] = ()


class Engine:
    """One rank's part of a vLLM replica. It starts with random weights, and refuses to generate until `weight_update`."""

    def __init__(
        self,
        model_path: str,
        settings: Rollout,
        dtype: str,
        grid: RolloutGrid,
        seed: int,
        max_prompt_tokens: int,
        stops: Sequence[int],
        heads: HeadsShape | None = None,
    ) -> None:
        """Collective over all ranks; torch.distributed is initialised (gloo on CPU, cpu:gloo,cuda:nccl on GPU).

        stops: the token ids that end a response.  heads: the draft heads that it has, whose weights come with the others.
        On CPU, vLLM's kernels use the threads that OMP_NUM_THREADS gave this process at its start, as the trainer does; give each
        rank its share of the cores there.
        Settings that do not fit the model or the memory raise ConfigError, alike on every rank and before vLLM starts.
        """
        self._settings, self._stops = settings, list(stops)
        self._max_prompt_tokens = max_prompt_tokens
        self._max_model_len = max_prompt_tokens + settings.max_tokens
        self._cuda = torch.cuda.is_available()
        self._shape = read_shape(model_path, "actor.path")
        self._heads = heads
        self._shard_numel = self._numel_of_shard(grid)
        check_settings(self._shape, settings, dtype, max_prompt_tokens)
        check_memory(settings, grid)
        with vllm_environment(self._cuda), rng_kept(), torch_threads_kept():
            self._llm = self._start(model_path, dtype, grid, seed)
        self._sampling = self._llm.collective_rpc(partial(_install_sampling, heads=heads))[0]
        self.weight_version: int | None = None
        self._kv_cache_awake = True
        self._update_unfinished = False
        self._running: dict[int, None] = {}
        self._drafted = 0

    def _start(self, model_path: str, dtype: str, grid: RolloutGrid, seed: int) -> LLM:
        """Collective over all ranks: vLLM with this rank in its place.

        Weights are random ("dummy"): all of them arrive by `weight_update` before the first use, so that reading them
        from disk would only cost time, and would hide a sync that was forgotten.
        """
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rlhf_mc.pipeline.vllm_parts import BLOCKS_BACKEND, check_head_dim, executor_for, register_blocks_engine

        register_blocks_engine()
        if not self._cuda:
            check_head_dim(self._shape.head_dim)
        ident = agreed_ident()
        with _speculation(self._heads, self._shape) as speculation:
            llm = LLM(
                model=model_path,
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
                load_format="dummy",
                tensor_parallel_size=grid.tensor,
                distributed_executor_backend=executor_for(grid, ident),
                weight_transfer_config=WeightTransferConfig(backend=BLOCKS_BACKEND),
                enforce_eager=self._settings.enforce_eager,
                max_model_len=self._max_model_len,
                max_num_seqs=self._settings.max_running_sequences,
                kv_cache_memory_bytes=int(self._settings.kv_cache_gib * GIB),
                block_size=BLOCK_TOKENS,
                enable_prefix_caching=True,
                enable_sleep_mode=self._cuda and self._settings.placement == "colocated",
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=seed,
                speculative_config=speculation,
            )
        if not self._cuda:
            forget_shared_memory_names(ident)
        return llm

    def _numel_of_shard(self, grid: RolloutGrid) -> int:
        """Elements of all weights that an update must bring."""
        numel = _numel(engine_pieces(self._shape, grid.tensor, grid.tensor_rank), hf_shapes(self._shape, value_head=False))
        if self._heads is not None:
            numel += _numel(heads_pieces(self._heads, grid.tensor, grid.tensor_rank), self._heads.tensors())
        return numel

    def generate(self, requests: Sequence[SampleRequest], *, version: int, greedy: bool = False) -> list[Completion]:
        """Collective over the replica's ranks: one completion per request, in order. See `submit` for what holds of them."""
        self.submit(dict(enumerate(requests)), version=version, greedy=greedy)
        found: dict[int, Completion] = {}
        while self.num_running:
            found |= self.step().finished
        return [found[position] for position in range(len(requests))]

    def submit(self, requests: Mapping[int, SampleRequest], *, version: int, greedy: bool = False) -> None:
        """Queues requests under their numbers, to be sampled from weights `version` by `step`. No collective, but all ranks of a
        replica must submit the same in the same order.

        Log-probs are those of the distribution sampled from: temperature applied; before `min_tokens` without the stop
        tokens, the others renormalised, which a trainer must do as well. Greedy ones are at temperature 1.
        Raises EngineError before the first `weight_update`, for another version than asked, while asleep, while earlier
        requests run, and for a request that does not fit; then none is queued.
        """
        self._check_ready(version)
        if self.num_running:
            raise EngineError(f"{self.num_running} earlier requests are not finished; step until they are, or call abort")
        self._check_requests(requests)
        for number, request in requests.items():
            prompt = {"prompt_token_ids": request.prompt_ids}
            self._llm.llm_engine.add_request(str(number), prompt, self._sampling_params(request, greedy))
        self._running, self._drafted = dict.fromkeys(requests), 0

    def step(self, drafted: int = 0) -> Step:
        """Collective over the replica's ranks: one step of the engine, which checks what the step before drafted.

        drafted: tokens to draft for each request, for the next step to check; needs heads. All ranks of a replica give the same.
        Raises EngineError where a log-prob is not finite. After any error no request is left running.
        """
        if not self._running:
            return Step({})
        checked, self._drafted = self._drafted, self._draft(drafted)
        try:
            with rng_kept():
                outputs = self._llm.llm_engine.step()
            finished = {int(output.request_id): _completion(output) for output in outputs if output.finished}
        except BaseException:
            self.abort()
            raise
        for number in finished:
            del self._running[number]
        scheduled = self._llm.llm_engine.model_executor.scheduled
        return Step(
            finished=finished,
            running=len(scheduled.num_scheduled_tokens),
            tokens=scheduled.total_num_scheduled_tokens,
            checked=checked,
            accepted=self._sampling.checker.accepted if scheduled.scheduled_spec_decode_tokens else (),
        )

    def _draft(self, count: int) -> int:
        """The number itself, once it is in force."""
        if not 0 <= count <= self.num_heads:
            raise EngineError(f"{count} drafted tokens: the engine has {self.num_heads} draft heads")
        if self._sampling.proposer is not None:
            self._sampling.proposer.num_drafted = count
        return count

    @property
    def num_running(self) -> int:
        """Requests that are submitted and not finished."""
        return len(self._running)

    @property
    def num_heads(self) -> int:
        """Draft heads, and so the most tokens that a step can draft for a request."""
        return 0 if self._heads is None else self._heads.num_heads

    @property
    def num_in_step(self) -> int:
        """Of these, how many the next step is going to work on, unless the KV cache is full."""
        return min(self.num_running, self._settings.max_running_sequences)

    def abort(self) -> None:
        """Forgets all requests that are not finished."""
        self._llm.llm_engine.abort_request([str(number) for number in self._running])
        self._running = {}

    def logprobs(self, token_ids: list[int], *, version: int) -> Tensor:
        """Collective over the replica's ranks: float32[len - 1], the model's log-prob of each token after the first, at temperature 1.

        Computed afresh, not from cached prefixes. Raises EngineError as `generate` does.
        """
        self._check_ready(version)
        self._check_requests({0: SampleRequest(token_ids, seed=0, max_tokens=1)})
        from vllm import SamplingParams

        with rng_kept():
            parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0, detokenize=False)
            output = self._llm.generate([{"prompt_token_ids": token_ids}], parameters, use_tqdm=False)[0]
        positions = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return torch.tensor([position[token].logprob for position, token in positions])

    def _check_ready(self, version: int) -> None:
        if self.weight_version is None:
            raise EngineError("the engine holds no weights yet, or lost them in sleep; sync first")
        if self.weight_version != version:
            raise EngineError(f"the engine holds weights {self.weight_version}, not {version}; sync first")
        if not self._kv_cache_awake:
            raise EngineError("the engine's KV cache is asleep; call wake_kv_cache first")

    def _check_requests(self, requests: Mapping[int, SampleRequest]) -> None:
        for number, request in requests.items():
            length, bound = len(request.prompt_ids), self._max_prompt_tokens
            if not 1 <= length <= bound or request.max_tokens > self._settings.max_tokens:
                raise EngineError(
                    f"request {number}: prompt of {length} tokens and max_tokens {request.max_tokens} do not lie within 1 to "
                    f"data.max_prompt_tokens = {bound} and rollout.max_tokens = {self._settings.max_tokens}"
                )
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._shape.vocab:
                raise EngineError(f"request {number}: a token id lies outside the vocabulary of {self._shape.vocab}")

    def _sampling_params(self, request: SampleRequest, greedy: bool) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if greedy else self._settings.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=self._stops,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @contextlib.contextmanager
    def weight_update(self, version: int) -> Iterator[WeightUpdate]:
        """Replaces all weights by version `version`, which the engine holds at the end of the block. Local to the rank.

        Gives the places for the blocks of this rank's shard. Forgets cached prefixes. Raises EngineError where blocks are
        missing at the end. After an error in the block the engine is of no more use: vLLM cannot take back half an update.
        """
        if self._update_unfinished:
            raise EngineError("an earlier weight update failed and left parts of two versions in the engine; start the run again")
        self.weight_version, self._update_unfinished = None, True
        update = WeightUpdate(self._llm, self._shard_numel)
        self._llm.collective_rpc("start_weight_update")
        yield update
        if update.missing:
            raise EngineError(f"weight update {version}: {update.missing} elements of this rank's shard were not sent, or sent twice")
        self._llm.collective_rpc("finish_weight_update")
        self._llm.reset_prefix_cache()
        self.weight_version, self._update_unfinished = version, False

    @property
    def writes_in_place(self) -> bool:
        """Whether weight updates go straight into the weights that vLLM computes from; else through its reload."""
        return self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine.writes_in_place)[0]

    def sleep(self) -> None:
        """Give the device memory of weights and KV cache back; both are lost.

        On CPU nothing is freed, as vLLM cannot sleep there, but the engine refuses to generate as on a GPU.
        """
        self.weight_version = None
        self._kv_cache_awake = False
        if self._cuda:
            self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Take device memory for the weights again; `weight_update` must follow. Nothing to do on CPU, see `sleep`."""
        if self._cuda:
            self._llm.wake_up(tags=["weights"])

    def wake_kv_cache(self) -> None:
        """Take device memory for the KV cache again, when the trainer has left. Nothing is taken on CPU, see `sleep`."""
        if self._cuda:
            self._llm.wake_up(tags=["kv_cache"])
        self._kv_cache_awake = True

    def close(self) -> None:
        """End vLLM and, as it does so, torch.distributed in this process: the last thing of a run, after an error too."""
        self.weight_version = None
        self._llm.llm_engine.engine_core.shutdown()


def _numel(pieces: Iterable[Piece], shapes: Shapes) -> int:
    """Elements of these pieces of whole tensors."""
    return sum(piece.numel(shapes[piece.name]) for piece in pieces)


def _install_sampling(worker: Any, heads: HeadsShape | None) -> Any:
    """Runs in vLLM's worker, which is in this process."""
    from rlhf_mc.pipeline.vllm_parts import install_sampling

    return install_sampling(worker, heads)


@contextlib.contextmanager
def _speculation(heads: HeadsShape | None, model: ModelShape) -> Iterator[dict[str, Any] | None]:
    """vLLM's speculative_config, whose directory holds no weights: they come with the others. It is read while the block lasts."""
    if heads is None:
        yield None
        return
    with TemporaryDirectory(prefix="rlhf_mc-heads-") as directory:
        write_heads_config(directory, heads, model)
        yield {"method": "medusa", "model": directory, "num_speculative_tokens": heads.num_heads}


def _completion(output: RequestOutput) -> Completion:
    sample = output.outputs[0]
    token_ids = list(sample.token_ids)
    logprobs = [position[token].logprob for position, token in zip(sample.logprobs, token_ids, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("the engine's log-probs are not finite; the weights that were loaded hold NaN, inf or huge values")
    return Completion(token_ids, logprobs, sample.finish_reason, sample.stop_reason)
