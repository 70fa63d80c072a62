#!/usr/bin/env bash
# PPO of Llama-3 70B on 32 GPUs of 80 GiB. On one node, or the same command on each of several:
#
#   bash scripts/run_ppo_70b.sh [key=value ...]
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/run_ppo_70b.sh [key=value ...]        NODE_RANK 0, 1, 2, 3
#
# ACTOR, REWARD_MODEL: Hugging Face directories.  PROMPTS: a file of prompts.  OUTPUT_DIR: where everything goes (runs/ppo_70b).
# CONFIG: the recipe (scripts/configs/ppo_llama3_70b.yaml; ppo_llama3_8b.yaml is for one node).
# NNODES (1; in a dry run 4), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (29500): as torchrun has them.  NPROC: ranks a node (8).
# DRY_RUN=1: prints the plan of memory and time and the command, and starts nothing; needs no GPU.
#   GPU_MEMORY_GIB (80), HOST_MEMORY_GIB (2000) a node, DEVICE (h100): what it plans for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=${CONFIG:-scripts/configs/ppo_llama3_70b.yaml}
dry_run=${DRY_RUN:-0}
export NPROC=${NPROC:-8} NNODES=${NNODES:-$((dry_run == 1 ? 4 : 1))}
output=${OUTPUT_DIR:-runs/ppo_70b}

# megatron-core's overlap of tensor-parallel communication needs kernels to start in the order in which they were queued.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# NVLink SHARP reserves device memory for each communicator, and trainer and engine have communicators of their own.
export NCCL_NVLS_ENABLE=0
# Not set, and taken out where the host sets it: expandable segments, which vLLM's sleep mode refuses.
unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
arguments=(--config "$config" trainer.output_dir="$output")
if [[ -n ${ACTOR:-} ]]; then arguments+=(actor.path="$ACTOR"); fi
if [[ -n ${REWARD_MODEL:-} ]]; then arguments+=(reward_model.path="$REWARD_MODEL" critic.path="$REWARD_MODEL"); fi
if [[ -n ${PROMPTS:-} ]]; then arguments+=(data.train="[$PROMPTS]"); fi
arguments+=("$@")

bash scripts/setup_env.sh
source "${RLHF_MC_VENV:-.venv}/bin/activate"
source scripts/launch.sh

if ((dry_run == 1)); then
    gpus=$((NPROC * NNODES))
    export NODE_RANK=${NODE_RANK:-0}
    echo "command on each node: torchrun $(torchrun_options | tr '\n' ' ')--nproc-per-node $NPROC -m rlhf_mc.train ${arguments[*]}"
    python -m rlhf_mc.main plan --gpus "$gpus" --gpus-per-node "$NPROC" --device "${DEVICE:-h100}" \
        --gpu-memory-gib "${GPU_MEMORY_GIB:-80}" --host-memory-gib "${HOST_MEMORY_GIB:-2000}" "${arguments[@]}"
    exit
fi

rendezvous=()
if ((NNODES > 1)); then rendezvous=(--port "${MASTER_PORT:-29500}" --address "${MASTER_ADDR:-localhost}" --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}"); fi
python scripts/preflight.py --gpus "$NPROC" --output "$output" --disk-gib 500 --shared-memory-gib 8 "${rendezvous[@]}"
launch rlhf_mc.train "${arguments[@]}"
if ((${NODE_RANK:-${SLURM_NODEID:-0}} == 0)); then rlhf-mc picture "$output" || true; fi
