#!/usr/bin/env bash
# One bench, with the environment and the memory that the recipes have: bash scripts/bench/run.sh NAME [arguments]
# For example: bash scripts/bench/run.sh offload --dtype fp32
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$(realpath -ms "${RLHF_MC_VENV:-$root/.venv}")
bash "$root/scripts/setup_env.sh"
source "$root/scripts/cpu_memory.sh" "$venv"
name=${1:?names a file of scripts/bench, for example: offload}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} PATH=$venv/bin:$PATH
exec python "$root/scripts/bench/$name.py" "${@:2}"
