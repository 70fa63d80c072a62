#!/usr/bin/env bash
# PPO of a real model on CPU ranks: SmolLM2-135M-Instruct from a PyPI package, chat prompts, rule-based rewards.
#
#   bash scripts/run_ppo_smollm2.sh [key=value ...]        NPROC: ranks (2).  RUN_DIR: where everything goes (runs/ppo_smollm2)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh
source "${RLHF_MC_VENV:-.venv}/bin/activate"
source scripts/launch.sh

run=${RUN_DIR:-runs/ppo_smollm2}
python scripts/make_smollm2.py "$run/model"
python scripts/make_smollm2_prompts.py "$run/prompts"
launch rlhf_mc.train --config scripts/configs/ppo_smollm2.yaml \
    trainer.output_dir="$run/ppo" actor.path="$run/model" critic.path="$run/model" \
    data.train="[$run/prompts/prompts.jsonl]" data.validation="[$run/prompts/validation.jsonl]" "$@"
printf 'Pictures:\n'
rlhf-mc picture "$run/ppo" || true  # the models are there, whatever becomes of the pictures
