# Sourced by the run_*.sh scripts: `launch MODULE ARGUMENTS` starts a program of rlhf_mc on NPROC ranks of this host (2).
#
# On one node --standalone takes a free port, so that launches at the same time never collide. On several (NNODES), the same command
# runs on each: they find each other at MASTER_ADDR and MASTER_PORT (localhost, 29500), each with its NODE_RANK; or, where RDZV_ID names
# the job, by c10d rendezvous, which numbers the nodes itself. LOG_DIR: where each rank's output goes, beside the terminal.
# MAX_RESTARTS (0): how often torchrun starts all ranks again when one has failed; a run goes on from its newest checkpoint then.
# Each rank gets its share of the cores: without OMP_NUM_THREADS torchrun gives it one.
#
# SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop (docs/reliability.md). They reach the ranks by way of this shell and torchrun,
# which ends ranks that are still there after SHUTDOWN_SECONDS (600): an update that was begun, and a checkpoint, must fit into it.
launch() {
    local ranks=${NPROC:-2} cores
    cores=$(nproc)
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))} \
        relay_signals torchrun $(torchrun_options) --nproc-per-node "$ranks" -m "$@"
}

# What torchrun is told beside the number of ranks and the program.
torchrun_options() {
    local address=${MASTER_ADDR:-localhost} port=${MASTER_PORT:-29500}
    if [[ -n ${RDZV_ID:-} ]]; then
        echo --nnodes "${NNODES:-1}" --rdzv-backend c10d --rdzv-id "$RDZV_ID" --rdzv-endpoint "$address:$port"
    elif ((${NNODES:-1} > 1)); then
        echo --nnodes "$NNODES" --node-rank "${NODE_RANK:?is the number of this node, from 0}" --master-addr "$address" --master-port "$port"
    else
        echo --standalone
    fi
    if [[ -n ${LOG_DIR:-} ]]; then echo --log-dir "$LOG_DIR" --tee 3; fi
    echo --max-restarts "${MAX_RESTARTS:-0}" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout "${SHUTDOWN_SECONDS:-600}"
}

_scripts=$(dirname "${BASH_SOURCE[0]}")
source "$_scripts/relay_signals.sh"
if command -v torchrun >/dev/null; then source "$_scripts/cpu_memory.sh" "$(dirname "$(dirname "$(command -v torchrun)")")"; fi
