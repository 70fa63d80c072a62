"""One rank of the engine tests, started by torchrun: `engine_ranks.py SPEC.json`. Writes what it saw to OUT/rank{r}.json.

No assertion is made here: tests/pipeline/test_engine.py judges the record.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_mc.batch import PromptBatch
from rlhf_mc.config import ConfigError, Rollout
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.medusa.shape import engine_pieces as heads_pieces
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.weight_layout import engine_pieces
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import Block
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest, assemble_rollout, deal, gather_completions, requests_for, sample_seed
from rlhf_mc.pipeline.engine import Engine, EngineError, Step

NUM_PROMPTS, SAMPLES, MIN_TOKENS, MAX_TOKENS, MAX_PROMPT = 6, 4, 5, 24, 12
STOP_TOKENS = list(range(2, 14))
DRAWS = 1500  # on each rank


def prompts() -> PromptBatch:
    lengths = torch.tensor([3 + 2 * i % 9 for i in range(NUM_PROMPTS)])
    tokens = torch.randint(20, 250, (int(lengths.sum()),), generator=torch.Generator().manual_seed(3))
    return PromptBatch(tokens, lengths, [{"row": i} for i in range(NUM_PROMPTS)], torch.arange(NUM_PROMPTS))


def changed_model(path: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `path` after an update: other weights than those on disk."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
    return model.to(dtype)


@torch.no_grad()
def reference(model, request: SampleRequest, completion: Completion, temperature: float, mask: bool) -> torch.Tensor:
    """Transformers' log-probs [response], of the distribution with stop tokens excluded before min_tokens if `mask`."""
    logits = model(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0, len(request.prompt_ids) - 1 : -1]
    logits = logits.float() / temperature
    if mask:
        logits[: request.min_tokens, STOP_TOKENS] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)


def differences(model, requests, completions, temperature: float, mask: bool = True) -> dict[str, float]:
    found = torch.cat(
        [reference(model, r, c, temperature, mask) - torch.tensor(c.logprobs) for r, c in zip(requests, completions, strict=True)]
    ).abs()
    return {"max": float(found.max()), "mean": float(found.mean())}


def heads_of(model: PreTrainedModel, heads: HeadsShape, scale: float) -> dict[str, torch.Tensor]:
    """Draft heads with random blocks. At scale 0 they guess that the next token comes again."""
    generator = torch.Generator().manual_seed(0)
    blocks = {name: torch.randn(heads.hidden, heads.hidden, generator=generator) * scale for name in heads.block_names}
    blocks = {name: values.to(model.dtype) for name, values in blocks.items()}
    return blocks | dict.fromkeys(heads.output_names, model.lm_head.weight.detach())


def blocks_of(
    model: PreTrainedModel, grid: RolloutGrid, heads: HeadsShape | None, scale: float = 0.0
) -> list[tuple[Block, torch.Tensor]]:
    """All weights of `model` and its heads that this rank's engine wants, cut from whole tensors, each row in a block of its own layout."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    pieces = engine_pieces(read_shape(model.config._name_or_path, "actor.path"), grid.tensor, grid.tensor_rank)
    if heads is not None:
        weights |= heads_of(model, heads, scale)
        pieces = heads_pieces(heads, grid.tensor, grid.tensor_rank) + pieces
    blocks = []
    for piece in pieces:
        values = weights[piece.name].narrow(piece.dim, piece.whole_start, piece.length)
        source = (grid.rank, piece.name, piece.whole_start)
        target = (grid.rank, piece.param, piece.start)
        dims = tuple(values.shape)
        where = piece.name, piece.dim, piece.whole_start, piece.length
        block = Block(*where, dims, *source, *target, in_one_stretch=piece.dim == 0)
        blocks.append((block, values))
    return blocks


def load(engine: Engine, blocks: list[tuple[Block, torch.Tensor]], version: int) -> None:
    with engine.weight_update(version) as update:
        for start in range(0, len(blocks), 5):
            some = blocks[start : start + 5]
            for place, (_, values) in zip(update.places([block for block, _ in some]), some, strict=True):
                place.copy_(values)
            update.filled([block for block, _ in some])


def message_of(action) -> str:
    """The error that `action` raises, with its class; empty if it raises none."""
    try:
        action()
    except (EngineError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_settings(path: str, dtype: str, grid: RolloutGrid) -> dict[str, str]:
    def start(**settings):
        rollout = Rollout(**{"tensor_parallel": grid.tensor, "max_tokens": MAX_TOKENS, **settings})
        return message_of(lambda: Engine(path, rollout, dtype, grid, 1, MAX_PROMPT, STOP_TOKENS))

    return {
        "kv_cache_over_host": start(kv_cache_gib=1e6),
        "kv_cache_under_one_sequence": start(kv_cache_gib=1e-6),
        "longer_than_model": start(max_tokens=4096),
    }


def refused_requests(engine: Engine, model: PreTrainedModel, grid: RolloutGrid, heads: HeadsShape | None) -> dict[str, str]:
    """What an engine that holds version 3 of the weights of `model` says to wrong calls."""
    good = SampleRequest([20, 21], 1, MAX_TOKENS)

    def asked(request: SampleRequest = good, version: int = 3) -> str:
        return message_of(lambda: engine.generate([request], version=version))

    refused = {
        "other_version": asked(version=2),
        "long_prompt": asked(SampleRequest([20] * (MAX_PROMPT + 1), 1, 4)),
        "foreign_token": asked(SampleRequest([20, 10**6], 1, 4)),
    }
    engine.sleep()
    engine.wake_weights()
    refused["after_sleep"] = asked()
    load(engine, blocks_of(model, grid, heads), 3)
    refused["kv_cache_asleep"] = asked()
    engine.wake_kv_cache()
    refused["awake"] = asked()
    refused["empty"] = str(engine.generate([], version=3))
    return refused | out_of_memory(engine) | poisoned(engine, model, grid, heads)


def out_of_memory(engine: Engine) -> dict[str, str]:
    """An error inside vLLM in the second step: itself, what it leaves, whether the next samples are as before."""
    requests = [SampleRequest([20, 21], seed, MAX_TOKENS, min_tokens=4) for seed in range(3)]
    before, error = engine.generate(requests, version=3), ""
    engine.submit(dict(enumerate(requests)), version=3)
    engine.step()
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    full = torch.OutOfMemoryError("no memory for the activations")
    with mock.patch.object(runner, "execute_model", side_effect=full):
        try:
            engine.step()
        except torch.OutOfMemoryError as raised:
            error = str(raised)
    left = str(engine.num_running)
    same = engine.generate(requests, version=3) == before
    return {"out_of_memory": error, "left_by_it": left, "same_afterwards": str(same)}


def poisoned(engine: Engine, model: PreTrainedModel, grid: RolloutGrid, heads: HeadsShape | None) -> dict[str, str]:
    """What an engine whose weights hold NaN says, and what it keeps of the rollout. NaN stays in its KV cache after that."""
    load(engine, [(block, torch.full_like(values, torch.nan)) for block, values in blocks_of(model, grid, heads)], 4)
    requests = [SampleRequest([20, 21], seed, MAX_TOKENS) for seed in range(3)]
    error = message_of(lambda: engine.generate(requests, version=4))
    return {"poisoned": error, "left": str(engine.num_running)}


def refused_updates(engine: Engine, model: PreTrainedModel, grid: RolloutGrid, heads: HeadsShape | None, bad_update: str) -> dict[str, str]:
    """One wrong update, and what the engine says after it."""
    blocks = blocks_of(model, grid, heads)
    wrong = blocks[:-1] if bad_update == "missing" else [*blocks, blocks[0]]
    return {
        "update": message_of(lambda: load(engine, wrong, 4)),
        "generate_after": message_of(lambda: engine.generate([SampleRequest([20, 21], 1, MAX_TOKENS)], version=4)),
        "update_after": message_of(lambda: load(engine, blocks, 4)),
    }


def mapped_shared_memory() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split("/dev/shm/")[1] for line in lines if "/dev/shm/" in line and "torch_" not in line})


def token_ids_of(engine: Engine, requests: list, batch: PromptBatch, grid: RolloutGrid, num_replicas: int) -> list[list[int]]:
    """The samples, dealt to `num_replicas` replicas, of which this rank's engine is several, one after another, or none."""
    found: dict[int, Completion] = {}
    for hand in deal(batch.lengths.tolist(), SAMPLES, num_replicas)[grid.replica :: grid.num_replicas]:
        found |= zip(hand, engine.generate([requests[i] for i in hand], version=3), strict=True)
    return [completion.token_ids for completion in gather_completions(found, grid, dist.group.WORLD).values()]


def stepwise(engine: Engine, requests: list) -> dict:
    """What one gets by stepping, the last request left out; and what the engine says to a second rollout meanwhile."""
    engine.submit(dict(enumerate(requests)), version=3)
    running, found = [engine.num_running], {}
    refused = message_of(lambda: engine.submit({99: requests[0]}, version=3))
    while engine.num_running > 1:
        found |= engine.step().finished
        running.append(engine.num_running)
    engine.abort()
    return {
        "running": running,
        "token_ids": {number: completion.token_ids for number, completion in found.items()},
        "refused": refused,
        "after_abort": [engine.num_running, len(engine.step().finished)],
    }


@torch.no_grad()
def probe_difference(engine: Engine, model: PreTrainedModel, token_ids: list[int]) -> float:
    token_ids = token_ids[:MAX_PROMPT]
    expected = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    found = engine.logprobs(token_ids, version=3)
    return float((expected.gather(1, torch.tensor(token_ids)[1:, None]).squeeze(1) - found).abs().max())


def record_samples(engine: Engine, path: str, spec: dict, rollout: Rollout, grid: RolloutGrid, heads: HeadsShape | None) -> dict:
    batch, temperature = prompts(), spec["temperature"]
    requests = requests_for(batch, rollout, run_seed=7, iteration=3)
    mine = deal(batch.lengths.tolist(), SAMPLES, grid.num_replicas)[grid.replica]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec["dtype"]]
    record: dict = {"after_load": []}
    for version in (1, 2, 3):
        model = changed_model(path, version, dtype)
        load(engine, blocks_of(model, grid, heads), version)
        found = dict(zip(mine, engine.generate([requests[i] for i in mine], version=version), strict=True))
        completions = gather_completions(found, grid, dist.group.WORLD)
        record["after_load"].append(differences(model, requests, list(completions.values()), temperature))
    greedy = engine.generate(requests, version=3, greedy=True)
    rollout_batch = assemble_rollout(batch, SAMPLES, completions)
    probe = requests[0].prompt_ids + greedy[0].token_ids
    completions = list(completions.values())
    return record | {
        "without_mask": differences(model, requests, completions, temperature, mask=False),
        "against_old_weights": differences(changed_model(path, 2, dtype), requests, completions, temperature),
        "greedy": differences(model, requests, greedy, 1.0),
        "completions": [[c.token_ids, c.finish_reason, c.stop_token] for c in completions],
        "as_other_replicas": [token_ids_of(engine, requests, batch, grid, count) for count in (1, 2, 4)],
        "stepwise": stepwise(engine, requests),
        "probe": probe_difference(engine, model, probe),
        "logprobs_of_batch": rollout_batch.rollout_logprobs.tolist(),
        "hand": mine,
        "drafted": drafted(engine, model, requests, grid, heads, temperature) if heads else None,
    }


def sampled(
    engine: Engine, requests: Sequence[SampleRequest], drafts: Callable[[int], int], greedy: bool = False
) -> tuple[list[Completion], list[Step]]:
    """The samples, and the steps that it took; `drafts` says how many tokens each step drafts."""
    engine.submit(dict(enumerate(requests)), version=3, greedy=greedy)
    found, steps = {}, []
    while engine.num_running:
        steps.append(engine.step(drafts(len(steps))))
        found |= steps[-1].finished
    return [found[number] for number in range(len(requests))], steps


def drafted(engine: Engine, model: PreTrainedModel, requests: list, grid: RolloutGrid, heads: HeadsShape, temperature: float) -> dict:
    """Samples with and without drafts, and with other heads; what the engine says to more drafts than heads."""
    record: dict = {"runs": []}
    for name, greedy, scale, drafts in (
        ("one", False, 0.0, lambda step: 1),
        ("all", False, 0.0, lambda step: heads.num_heads),
        ("changing", False, 0.0, lambda step: step % (heads.num_heads + 1)),
        ("greedy", True, 0.0, lambda step: heads.num_heads),
        ("stale", True, 0.3, lambda step: heads.num_heads),
    ):
        load(engine, blocks_of(model, grid, heads, scale), 3)
        plain, _ = sampled(engine, requests, lambda step: 0, greedy)
        completions, steps = sampled(engine, requests, drafts, greedy)
        record["runs"].append({
            "name": name,
            "same": [c.token_ids for c in completions] == [c.token_ids for c in plain],
            "difference": differences(model, requests, completions, 1.0 if greedy else temperature)["max"],
            "checked": [step.checked for step in steps],
            "decodes_only": [step.tokens == step.running * (1 + step.checked) for step in steps],
            "accepted": sum(sum(step.accepted) for step in steps),
            "emitted": sum(len(c.token_ids) for c in completions),
            "running": sum(step.running for step in steps),
        })
    first = SampleRequest(requests[0].prompt_ids, 0, max_tokens=2)
    many = [replace(first, seed=sample_seed(grid.rank // grid.tensor, 0, sample)) for sample in range(DRAWS)]
    record["second_tokens"] = [c.token_ids[1] for c in sampled(engine, many, lambda step: 1)[0] if len(c.token_ids) == 2]
    record["distribution"] = second_token_distribution(model, first.prompt_ids, temperature).tolist()
    engine.submit({0: requests[0]}, version=3)
    record["too_many"] = message_of(lambda: engine.step(heads.num_heads + 1))
    engine.abort()
    return record


@torch.no_grad()
def second_token_distribution(model: PreTrainedModel, prompt: list[int], temperature: float) -> torch.Tensor:
    """float[V]: of the second token of a response, where the first does not end it."""
    first = (model(torch.tensor([prompt])).logits[0, -1].float() / temperature).softmax(0)
    going_on = [token for token in range(len(first)) if token not in STOP_TOKENS]
    sequences = torch.tensor([[*prompt, token] for token in going_on])
    second = (model(sequences).logits[:, -1].float() / temperature).softmax(1)
    joint = first[going_on, None] * second
    return joint.sum(0) / joint.sum()


def main(spec: dict) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    grid = RolloutGrid(TrainingGrid(dist.get_world_size(), rank, spec["training_tensor"], 1), spec["tensor"])
    path, dtype = spec["model"], spec["dtype"]
    rollout = Rollout(
        tensor_parallel=spec["tensor"], samples_per_prompt=SAMPLES, temperature=spec["temperature"],
        min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS, kv_cache_gib=spec["kv_cache_gib"], max_running_sequences=16,
    )  # fmt: skip
    if not spec["repacks"]:
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False  # as in a build without oneDNN, which leaves weights as they are
    record: dict = {"refused_settings": refused_settings(path, dtype, grid)}
    rng, environment, threads = torch.get_rng_state(), os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()
    shape = read_shape(path, "actor.path")
    heads = HeadsShape(3, 2, spec["heads"] == "shared", shape.hidden, shape.vocab) if spec["heads"] else None
    engine = Engine(path, rollout, dtype, grid, 1, MAX_PROMPT, STOP_TOKENS, heads)
    record["kept"] = {
        "rng": torch.equal(rng, torch.get_rng_state()),
        "local_world_size": os.environ["LOCAL_WORLD_SIZE"] == environment,
        "threads": torch.get_num_threads() == threads and torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker",
    }
    record["writes_in_place"] = engine.writes_in_place
    record["replica_ranks"] = grid.ranks_of(grid.replica)
    record["shared_memory"] = mapped_shared_memory()
    record["before_first_load"] = message_of(lambda: engine.generate([SampleRequest([20], 1, 1)], version=0))
    record |= record_samples(engine, path, spec, rollout, grid, heads)
    model = changed_model(path, 3, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    record["refused_requests"] = refused_requests(engine, model, grid, heads)
    record["refused_updates"] = refused_updates(engine, model, grid, heads, spec["bad_update"])
    Path(spec["out"], f"rank{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    if spec["end"] == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
