#!/usr/bin/env bash
# The whole RLHF of a tiny Llama on CPU ranks, in minutes: SFT, reward model, PPO. scripts/make_tiny_task.py says what it learns.
#
#   bash scripts/run_ppo_tiny.sh [key=value ...]
#
# Overrides go to the PPO program; those of trainer.seed, trainer.dtype, trainer.device, parallel and wandb to all three,
# those of supervised to the first two; those that say which draft heads there are (medusa.enabled, num_heads, num_layers,
# shared_output) to SFT, which makes them, as well.
# NPROC: ranks (2).  RUN_DIR: where everything goes (runs/ppo_tiny); task, models, metrics and samples are found there.
# KEEP_MODELS=1: task and models that an earlier start has finished stay; as when a job of Slurm goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh
source "${RLHF_MC_VENV:-.venv}/bin/activate"
source scripts/launch.sh

SECONDS=0
run=${RUN_DIR:-runs/ppo_tiny}
common=() heads=()
for override in "$@"; do
    case $override in
        trainer.seed=* | trainer.dtype=* | trainer.device=* | supervised.* | parallel.* | wandb.*) common+=("$override") ;;
        medusa.enabled=* | medusa.num_heads=* | medusa.num_layers=* | medusa.shared_output=*) heads+=("$override") ;;
    esac
done
title() { printf '\n== %s ==\n' "$1"; }
kept() { [[ ${KEEP_MODELS:-0} == 1 && -e $1 ]] && echo "$(dirname "$1") was made before"; }

# A mistyped override shows now, not when the first two programs are through.
python -m rlhf_mc.train --config scripts/configs/ppo_tiny.yaml --print-config "$@" >/dev/null

title "Task: shift digits"
kept "$run/task/prompts.jsonl" || python scripts/make_tiny_task.py "$run/task"

title "1 of 3: supervised fine-tuning, with draft heads"
kept "$run/sft/model/config.json" || launch rlhf_mc.stages.sft --config scripts/configs/tiny_sft.yaml \
    trainer.output_dir="$run/sft" supervised.path="$run/task/model" \
    data.train="[$run/task/sft.jsonl]" data.validation="[$run/task/sft_validation.jsonl]" \
    ${common[@]+"${common[@]}"} ${heads[@]+"${heads[@]}"}

title "2 of 3: reward model"
kept "$run/reward_model/model/config.json" || launch rlhf_mc.stages.reward_model --config scripts/configs/tiny_reward_model.yaml \
    trainer.output_dir="$run/reward_model" supervised.path="$run/sft/model" \
    data.train="[$run/task/preferences.jsonl]" data.validation="[$run/task/preferences_validation.jsonl]" \
    ${common[@]+"${common[@]}"}

title "3 of 3: PPO"
launch rlhf_mc.train --config scripts/configs/ppo_tiny.yaml \
    trainer.output_dir="$run/ppo" actor.path="$run/sft/model" medusa.path="$run/sft/medusa" reward_model.path="$run/reward_model/model" \
    data.train="[$run/task/prompts.jsonl]" data.validation="[$run/task/validation.jsonl]" "$@"

printf '\nSFT, reward model and PPO took %d min %02d s. ' $((SECONDS / 60)) $((SECONDS % 60))
printf 'Everything is in %s\n' "$(realpath "$run")"
printf 'Pictures of PPO:\n'
rlhf-mc picture "$run/ppo" || true  # the models are there, whatever becomes of the pictures
