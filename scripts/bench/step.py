"""One whole PPO step of a real model on one CPU rank, against the model FLOPs of that step at the GEMM rate of the same run.

    bash scripts/bench/run.sh step MODEL_DIR [--dtype bf16] [--repeats 7] [key=value ...]

The step is what the trainer does: weight sync, generation by vLLM, four scoring passes, training of critic and actor;
32 samples of 16 + 32 tokens, one epoch, one optimizer step a role. Two limits: the FLOPs at the rate of a large square
product, and the time that this model's own products take one by one (a small model's are slower than a square one, those
of decoding most of all: 32 rows). Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rlhf_mc.batch import PromptBatch
from rlhf_mc.config import Settings
from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.recipe import load_settings

NUM_SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 16, 32
GEMM_SIZE = 2048
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FixedPrompts:
    """Random token ids in place of a dataset, so that every prompt has exactly the wanted length."""

    def __init__(self, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(100, vocab, (NUM_SAMPLES * PROMPT_TOKENS,), generator=generator)

    def batch(self, iteration: int) -> PromptBatch:
        lengths = torch.full((NUM_SAMPLES,), PROMPT_TOKENS)
        return PromptBatch(self.tokens, lengths, [{} for _ in range(NUM_SAMPLES)], torch.arange(NUM_SAMPLES))


def linears(shape: ModelShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of the four linear layers of one decoder layer."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [(shape.hidden, q + 2 * kv), (q, shape.hidden), (shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)]


def step_flops(shape: ModelShape, forwards_with_head: int, forwards_without_head: int) -> dict[str, float]:
    """Multiply-adds times two that the step needs: each token through the layers, the output layer where a number is asked for.

    Causal attention counts half of the full square. A backward is two forwards.
    """
    layer = sum(inputs * outputs for inputs, outputs in linears(shape))
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    attention = 2 * 2 * shape.num_heads * shape.head_dim * (tokens + 1) / 2
    body = NUM_SAMPLES * tokens * shape.num_layers * (2 * layer + attention)
    head = NUM_SAMPLES * RESPONSE_TOKENS * 2 * shape.hidden * shape.vocab
    return {
        "generate": body + head,
        "score": forwards_with_head * (body + head) + forwards_without_head * body,
        "update_critic": 3 * body,
        "update_actor": 3 * (body + head),
    }


def best_seconds(product: Callable[[], torch.Tensor]) -> float:
    """Seconds of one product, the best of three after a warm-up."""
    product()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    return 2 * GEMM_SIZE**3 / best_seconds(lambda: a @ b)


def linear_seconds(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[float, float]:
    """(forward, backward) of one linear layer: x W^T; grad W and grad^T x."""
    x, weight, grad = (torch.randn(*size, dtype=dtype) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    return best_seconds(lambda: x @ weight.t()), best_seconds(lambda: grad @ weight) + best_seconds(lambda: grad.t() @ x)


def products_seconds(shape: ModelShape, dtype: torch.dtype) -> float:
    """What the matrix products of one step take by themselves, each with the rows that it has in the step."""

    def body(rows: int) -> tuple[float, float]:
        times = [linear_seconds(rows, *linear, dtype) for linear in linears(shape)]
        return tuple(shape.num_layers * sum(direction) for direction in zip(*times))

    def head(rows: int) -> tuple[float, float]:
        return linear_seconds(rows, shape.hidden, shape.vocab, dtype)

    forward, backward = body(NUM_SAMPLES * (PROMPT_TOKENS + RESPONSE_TOKENS))
    head_forward, head_backward = head(NUM_SAMPLES * RESPONSE_TOKENS)
    prompts, step, step_head = body(NUM_SAMPLES * PROMPT_TOKENS)[0], body(NUM_SAMPLES)[0], head(NUM_SAMPLES)[0]
    generate = prompts + RESPONSE_TOKENS * (step + step_head)
    score = 4 * forward + 2 * head_forward
    update = 2 * (forward + backward) + head_forward + head_backward
    return generate + score + update


def settings_for(model: str, dtype: str, output: str, overrides: list[str]) -> Settings:
    """PPO of `model` in all four roles on one rank."""
    rows = Path(output) / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "unused"}) + "\n")
    sections = [
        f"trainer.output_dir={output}", "trainer.device=cpu", f"trainer.dtype={dtype}", "trainer.iterations=1000", "wandb.mode=disabled",
        f"actor.path={model}", f"reward_model.path={model}", f"data.train=[{rows}]",
        f"data.prompts_per_iteration={NUM_SAMPLES}", f"data.max_prompt_tokens={PROMPT_TOKENS * 4}",
        f"rollout.max_tokens={RESPONSE_TOKENS}", f"rollout.min_tokens={RESPONSE_TOKENS}",
        f"rollout.max_running_sequences={NUM_SAMPLES}", "rollout.kv_cache_gib=0.25",
    ]  # fmt: skip
    settings, _ = load_settings(sections + overrides, "train")
    settings.check("train", 1)
    return settings


def measure(model: str, dtype: str, repeats: int, overrides: list[str]) -> dict:
    """Runs the steps and prints the table; the JSON object of the last line."""
    from rlhf_mc.parallel.job import Job
    from rlhf_mc.parallel.world import leave_world
    from rlhf_mc.stages.make_experience import make_experience
    from rlhf_mc.stages.start import start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights
    from rlhf_mc.stages.train import train

    shape = read_shape(model)
    flops = step_flops(shape, forwards_with_head=2, forwards_without_head=2)
    steps, rates, products, stages = [], [], [], []
    with tempfile.TemporaryDirectory() as output:
        settings = settings_for(model, dtype, output, overrides)
        with start_ppo(settings, Job.of(os.environ)) as run:
            run.sources = replace(run.sources, prompts=FixedPrompts(shape.vocab))
            for iteration in range(repeats + 1):
                rates.append(gemm_rate(TORCH_DTYPES[dtype]))
                products.append(products_seconds(shape, TORCH_DTYPES[dtype]))
                run.clock.metrics()
                start = time.perf_counter()
                sync_weights(run)
                train(run, make_experience(run, iteration), iteration)
                steps.append(time.perf_counter() - start)
                stages.append({k.removeprefix("timing_s/"): v for k, v in run.clock.metrics().items() if k.startswith("timing_s/")})
        leave_world()
    seconds, rate = statistics.median(steps[1:]), statistics.median(rates)
    print(f"{dtype}, {torch.get_num_threads()} threads, {repeats} steps after a warm-up; GEMM {rate / 1e9:.0f} GFLOP/s")
    print(f"{'stage':24}{'GFLOP':>10}{'seconds':>10}{'of GEMM rate':>14}")
    for name in stages[-1]:
        median = statistics.median(s[name] for s in stages[1:])
        share = f"{flops[name] / rate / median:.2f}" if name in flops else ""
        print(f"{name:24}{flops[name] / 1e9 if name in flops else float('nan'):10.0f}{median:10.2f}{share:>14}")
    limit, own_limit = sum(flops.values()) / rate, statistics.median(products)
    print(f"limits: {limit:.2f} s at the rate of a square product, {own_limit:.2f} s for the model's own products one by one")
    return {
        "name": f"ppo_step_{dtype}", "measured": round(seconds, 3), "limit": round(limit, 3), "ratio": round(limit / seconds, 3), "unit": "s",
        "limit_own_products": round(own_limit, 3), "ratio_own_products": round(own_limit / seconds, 3),
        "gemm_gflops": round(rate / 1e9, 1), "model_gflop": round(sum(flops.values()) / 1e9, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings other than the bench's own")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    use_share_of_cores()
    print(json.dumps(measure(arguments.model, arguments.dtype, arguments.repeats, arguments.overrides)))


if __name__ == "__main__":
    main()
