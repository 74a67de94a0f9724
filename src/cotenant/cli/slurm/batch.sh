# Runs a batch script of `sbatch` on the first node of a job; on its other nodes, runs the steps that `srun` starts.
# Arguments: output pattern, error pattern, "append" or "", a signal that only steps get or "", interpreter, its option,
# srun.sh or "", the script, and its arguments.
# Output is written to the files and to Cotenant's log. A file that cannot be opened leaves the log alone.
number "${COTENANT_ARRAY_ID:-$COTENANT_JOB_ID}"
SLURM_JOB_ID=$number
if [ -n "${COTENANT_ARRAY_ID:-}" ]; then
    export SLURM_ARRAY_JOB_ID="$number" SLURM_ARRAY_TASK_ID="$COTENANT_ARRAY_INDEX"
    SLURM_JOB_ID=$number$(printf %06d "$COTENANT_ARRAY_INDEX")
fi
[ "$COTENANT_ATTEMPT" -gt 1 ] && export SLURM_RESTART_COUNT=$((COTENANT_ATTEMPT - 1))
export SLURM_JOB_ID SLURM_JOBID="$SLURM_JOB_ID" SLURM_NODEID="$RANK" SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GTIDS=0
export SLURM_CPUS_ON_NODE="$(count "${COTENANT_CORES:-$(seq -s, "$(nproc)")}")"
export SLURM_JOB_CPUS_PER_NODE="$SLURM_CPUS_ON_NODE" SLURMD_NODENAME="$(uname -n)" SLURM_TASK_PID="$$"
export SLURM_JOB_NODELIST="$SLURMD_NODENAME" SLURM_NODELIST="$SLURMD_NODENAME"
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    export SLURM_JOB_GPUS="$CUDA_VISIBLE_DEVICES" SLURM_GPUS_ON_NODE="$(count "$CUDA_VISIBLE_DEVICES")"
fi
output=$1 error=$2 mode=$3 steps_signal=$4 interpreter=$5 option=$6 steps_program=$7 script=$8
shift 8
trap : HUP INT QUIT USR1 USR2 ALRM TERM  # the script gets them as well, and decides
[ -z "$steps_signal" ] || trap '' "$steps_signal"
temporary=$(mktemp -d "${TMPDIR:-/tmp}/slurm_job.XXXXXX") || exit 1
if [ -n "$steps_program" ]; then
    printf '#!/bin/sh\n%s\n' "$steps_program" > "$temporary/srun"
    chmod 755 "$temporary/srun"
    export PATH="$temporary:$PATH" COTENANT_SLURM_SRUN="$temporary/srun"
fi
nodes=$WORLD_SIZE
export COTENANT_SLURM_STEPS="$temporary"
steps=$PWD/.slurm_job-$SLURM_JOB_ID-$COTENANT_ATTEMPT
if [ "$nodes" -gt 1 ]; then
    [ -n "${COTENANT_SUBMIT_DIR:-}${SLURM_JOB_CHDIR:-}" ] || {
        echo "slurmstepd: error: a job on several nodes needs its folder on each of them: $SLURM_SUBMIT_DIR" >&2
        exit 1
    }
    export SLURM_JOB_CPUS_PER_NODE="$SLURM_CPUS_ON_NODE(x$nodes)" COTENANT_SLURM_STEPS="$steps"
    mkdir -p "$steps" && uname -n > "$steps/.node.$RANK" && mv "$steps/.node.$RANK" "$steps/node.$RANK" || exit 1
fi
if [ "$RANK" -gt 0 ]; then
    step=0
    until [ -e "$steps/end" ] || [ ! -d "$steps" ]; do
        if [ -e "$steps/step.$step/go" ]; then
            ( . "$steps/step.$step/go"; COTENANT_SLURM_STEP=$step exec "$temporary/srun" "$@" ) &
            step=$((step + 1))
        else
            sleep 0.2
        fi
    done
    rm -rf "$temporary"
    : > "$steps/left.$RANK"
    exit 0
fi
if [ "$nodes" -gt 1 ]; then
    node=0 names=
    while [ "$node" -lt "$nodes" ]; do
        until [ -e "$steps/node.$node" ]; do sleep 0.1; done
        names=$names${names:+,}$(cat "$steps/node.$node") node=$((node + 1))
    done
    export SLURM_JOB_NODELIST="$names" SLURM_NODELIST="$names"
fi
printf '%s' "$script" > "$temporary/slurm_script"
set -- "$temporary/slurm_script" "$@"
[ -n "$option" ] && set -- "$option" "$@"
copy() {  # sets `pipe` to a pipe whose input goes to a file as well; "" if the file cannot be written
    expand "$1"
    pipe=
    if ( if [ "$mode" = append ]; then : >> "$file"; else : > "$file"; fi ) 2> /dev/null; then
        pipe=$temporary/$2
        mkfifo "$pipe"
        ( trap '' HUP INT QUIT USR1 USR2 ALRM TERM; tee -a "$file" < "$pipe"; : > "$pipe.done" ) &
    else
        echo "slurmstepd: error: Could not open $2 file $file" >&2
    fi
}
copy "$output" stdout
out=$pipe pipe=$out
[ -n "$error" ] && copy "$error" stderr >&2
err=$pipe
"$interpreter" "$@" > "${out:-/dev/stdout}" 2> "${err:-/dev/stderr}" < /dev/null
status=$?
for pipe in $out $err; do
    tries=0  # what the script left running may hold the pipe
    until [ -e "$pipe.done" ] || [ $tries -ge 200 ]; do sleep 0.05; tries=$((tries + 1)); done
done
if [ "$nodes" -gt 1 ]; then
    : > "$steps/end"
    node=1 tries=0
    while [ "$node" -lt "$nodes" ] && [ $tries -lt 300 ]; do
        if [ -e "$steps/left.$node" ]; then node=$((node + 1)); else sleep 0.1; tries=$((tries + 1)); fi
    done
    rm -rf "$steps"
fi
rm -rf "$temporary"
exit $status
