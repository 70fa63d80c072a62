"""vLLM as anybody starts it, on what a run saved: `plain_vllm.py ACTOR HEADS OUT.json`. Greedy answers, their log-probs, and how many drafts were accepted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPTS = [[3, 5, 7, 9], [4, 4, 8], [6, 5, 3, 8, 7], [10, 9]]
MAX_TOKENS = 12


def main(actor: str, heads: str, out: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=actor, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=32, kv_cache_memory_bytes=1 << 22,
        disable_log_stats=False, speculative_config={"method": "medusa", "model": heads, "num_speculative_tokens": 3},
    )  # fmt: skip
    parameters = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters, use_tqdm=False)
    weights = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model.state_dict()
    counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")}
    record = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[chosen[token].logprob for token, chosen in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)] for o in outputs],
        "counts": counts,
        "weights": {name: [float(tensor.double().sum()), float(tensor.double().square().sum())] for name, tensor in weights.items()},
    }
    Path(out).write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
