# Sourced by the run_*.sh scripts: `launch MODULE ARGUMENTS` starts a program of rlhf_mc on NPROC ranks of this host (2).
#
# --standalone takes a free port, so that launches at the same time never collide. Each rank gets its share of the cores:
# without OMP_NUM_THREADS torchrun gives it one.
launch() {
    local ranks=${NPROC:-2} cores
    cores=$(nproc)
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))} \
        torchrun --standalone --nproc-per-node "$ranks" -m "$@"
}

source "$(dirname "${BASH_SOURCE[0]}")/cpu_memory.sh" "$(dirname "$(dirname "$(command -v torchrun)")")"
