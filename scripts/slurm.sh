# Sourced by the submit_*.sbatch scripts: `run_attempt COMMAND ARGUMENTS` runs the command once on each node of the job.
#
# The command is one of the run_*.sh scripts, which start torchrun on their node. The nodes find each other by c10d rendezvous
# on the first of them, under a name and a port that are this job's own, so that jobs on the same nodes never meet.
# The signal that Slurm sends ahead of the time limit (sbatch --signal), and `scancel --signal=USR1 --batch JOB`, ask the run to save
# and leave; the job is then put back in the queue and goes on from its checkpoint. Preempted jobs get SIGTERM with the same
# effect, and Slurm puts them back itself. Each attempt has a folder of its own for the output of its ranks; output_dir, and with it the
# checkpoints and the id of the wandb run, are the same for all attempts.
#
# LOG_ROOT: of those folders (slurm_logs).
# CONTAINER_IMAGE: an image for srun's --container-image (pyxis), with CONTAINER_MOUNTS for its mounts; bare without.
# LEAVE_SECONDS: what the ranks have to save and leave (600); the --signal of the job must come so much earlier than its end, and more.

source scripts/relay_signals.sh
: "${SLURM_JOB_ID:?this is for a job of Slurm: sbatch ${0##*/}}"
attempt=${SLURM_RESTART_COUNT:-0}

_container() {
    [[ -z ${CONTAINER_IMAGE:-} ]] && return
    printf -- '--container-image=%s\n--container-workdir=%s\n' "$CONTAINER_IMAGE" "$PWD"
    printf -- '--container-mounts=%s\n' "$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
}

run_attempt() {
    local first container status=0
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export NNODES=$SLURM_JOB_NUM_NODES RDZV_ID=$SLURM_JOB_ID.$attempt MASTER_ADDR=$first MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    export LOG_DIR=${LOG_ROOT:-slurm_logs}/$SLURM_JOB_ID/attempt_$attempt SHUTDOWN_SECONDS=${LEAVE_SECONDS:-600}
    mkdir -p "$LOG_DIR"
    echo "job $SLURM_JOB_ID, attempt $attempt, on $NNODES node(s) from $first; output of the ranks in $LOG_DIR"
    mapfile -t container < <(_container)
    # A rank that fails must not leave the other nodes waiting for it: srun ends them all.
    relay_signals srun --kill-on-bad-exit=1 --ntasks="$NNODES" --ntasks-per-node=1 "${container[@]}" "$@" || status=$?
    if [[ $asked_to_leave == yes && $status != 0 ]]; then
        echo "job $SLURM_JOB_ID, attempt $attempt, was asked to leave; it goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}
