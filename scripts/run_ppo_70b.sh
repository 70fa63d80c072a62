#!/usr/bin/env bash
# PPO of Llama-3 70B on 32 GPUs of 80 GiB. On one node, or the same command on each of several:
#
#   bash scripts/run_ppo_70b.sh [key=value ...]
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/run_ppo_70b.sh [key=value ...]        NODE_RANK 0, 1, 2, 3
#
# ACTOR, REWARD_MODEL: Hugging Face directories.  PROMPTS: a file of prompts.  OUTPUT_DIR: where everything goes (runs/ppo_70b).
# CONFIG: the recipe (scripts/configs/ppo_llama3_70b.yaml; ppo_llama3_8b.yaml is for one node).
# NNODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (29500): as torchrun has them.  NPROC: ranks a node (8).
# DRY_RUN=1: prints the plan of memory and time and the command, and starts nothing; needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=${CONFIG:-scripts/configs/ppo_llama3_70b.yaml}
export NPROC=${NPROC:-8} NNODES=${NNODES:-1}

# megatron-core's overlap of tensor-parallel communication needs kernels to start in the order in which they were queued.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# NVLink SHARP reserves device memory for each communicator, and trainer and engine have communicators of their own.
export NCCL_NVLS_ENABLE=0
# Not set, and taken out where the host sets it: expandable segments, which vLLM's sleep mode refuses.
unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
arguments=(--config "$config" trainer.output_dir="${OUTPUT_DIR:-runs/ppo_70b}")
[[ -n ${ACTOR:-} ]] && arguments+=(actor.path="$ACTOR")
[[ -n ${REWARD_MODEL:-} ]] && arguments+=(reward_model.path="$REWARD_MODEL")
[[ -n ${PROMPTS:-} ]] && arguments+=(data.train="[$PROMPTS]")
arguments+=("$@")
