# Sourced by the run_*.sh scripts: `launch MODULE ARGUMENTS` starts a program of rlhf_mc on NPROC ranks of this host (2).
#
# --standalone takes a free port, so that launches at the same time never collide. Each rank gets its share of the cores:
# without OMP_NUM_THREADS torchrun gives it one.
#
# SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop (docs/reliability.md). They reach the ranks by way of this shell and torchrun,
# which ends ranks that are still there after SHUTDOWN_SECONDS (600): an update that was begun, and a checkpoint, must fit into it.
launch() {
    local ranks=${NPROC:-2} cores torchrun status
    cores=$(nproc)
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))} \
        torchrun --standalone --nproc-per-node "$ranks" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
        --shutdown-timeout "${SHUTDOWN_SECONDS:-600}" -m "$@" <&0 &
    torchrun=$!
    trap 'kill -TERM "$torchrun" 2>/dev/null' TERM
    trap 'kill -USR1 "$torchrun" 2>/dev/null' USR1
    trap : INT # the terminal tells torchrun by itself
    while true; do
        status=0
        wait "$torchrun" || status=$?
        kill -0 "$torchrun" 2>/dev/null || break # else it was a signal to this shell that ended the wait
    done
    trap - TERM USR1 INT
    return "$status"
}

source "$(dirname "${BASH_SOURCE[0]}")/cpu_memory.sh" "$(dirname "$(dirname "$(command -v torchrun)")")"
