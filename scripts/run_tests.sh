#!/usr/bin/env bash
# All tests, in the environment that setup_env.sh makes: bash scripts/run_tests.sh [pytest arguments]
# For example: bash scripts/run_tests.sh tests/algorithms -x, or -m "not slow".
# Without arguments, two files at a time: a test of several ranks rarely keeps two cores busy.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RLHF_MC_VENV=$(realpath -ms "${RLHF_MC_VENV:-$root/.venv}")
export RLHF_MC_VENV
bash "$root/scripts/setup_env.sh"
cd "$root"
source scripts/cpu_memory.sh "$RLHF_MC_VENV"
# Those of Slurm first, since they wait most.
(($#)) || set -- -n 2 --dist loadfile --no-loadscope-reorder tests/slurm tests
exec "$RLHF_MC_VENV/bin/python" -m pytest --durations=15 "$@" </dev/null
