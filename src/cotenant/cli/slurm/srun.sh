# `srun` within a job of `sbatch`: runs a command once for each task, on each node of the job.
usage() { echo "srun: error: $*" >&2; exit 1; }
quoted() {  # prints its arguments so that a shell reads them again
    for word in "$@"; do printf " '"; printf %s "$word" | sed "s/'/'\\\\''/g"; printf "'"; done
}
export SLURM_NODEID="${SLURM_NODEID:-0}" SLURMD_NODENAME="${SLURMD_NODENAME:-$(uname -n)}"
nodes=${SLURM_JOB_NUM_NODES:-1} tasks= output= error= label= folder= cpus= named=
set_option() {  # a name and its value
    case $1 in
        n | ntasks) tasks=$2 ;;
        N | nodes) nodes=${2%%-*} ;;
        c | cpus-per-task) cpus=$2 ;;
        o | output) output=$2 ;;
        e | error) error=$2 ;;
        D | chdir) folder=$2 ;;
        J | job-name) named=$2 ;;
        ntasks-per-node) tasks=${tasks:-$(($2 * nodes))} ;;
        export) [ "$2" = ALL ] || case $2 in ALL,*) export_named "${2#ALL,}" ;; *) export_named "$2" ;; esac ;;
    esac
}
export_named() {
    old=$IFS IFS=,
    for pair in $1; do case $pair in *=*) export "$pair" ;; esac; done
    IFS=$old
}
original=$(quoted "$@") begun_in=$PWD
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --label | -l) label=yes; shift ;;
        --unbuffered | -u | --exclusive | --overlap | --exact | --quiet | -Q | --verbose | -v | --disable-status | -s | \
        --kill-on-bad-exit | -K | --pty | --overcommit | -O | --no-kill | -k | --oversubscribe | --whole) shift ;;
        --*=*) name=${1%%=*}; set_option "${name#--}" "${1#*=}"; shift ;;
        --*) [ $# -ge 2 ] || usage "option $1 needs a value"; set_option "${1#--}" "$2"; shift 2 ;;
        -?) [ $# -ge 2 ] || usage "option $1 needs a value"; set_option "${1#-}" "$2"; shift 2 ;;
        -?*) short=${1#-}; value=${short#?}; set_option "${short%"$value"}" "${value#=}"; shift ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || usage "No command given to execute."
command -v "$1" > /dev/null || { echo "slurmstepd: error: execve(): $1: No such file or directory" >&2; exit 2; }
tasks=${tasks:-${SLURM_NTASKS:-$nodes}}
case $tasks$nodes in *[!0-9]*) usage "Invalid numeric value \"$tasks\" for --ntasks." ;; esac
[ "$nodes" -le "${SLURM_JOB_NUM_NODES:-1}" ] || usage "Unable to create step: Requested node configuration is not available"
[ "$tasks" -ge "$nodes" ] || nodes=$tasks
[ "$SLURM_NODEID" -lt "$nodes" ] || exit 0
[ -n "$cpus" ] && export SLURM_CPUS_PER_TASK="$cpus"
[ -n "$named" ] && export SLURM_JOB_NAME="$named"
[ -n "$folder" ] && { cd "$folder" || exit 1; }
shared=${COTENANT_SLURM_STEPS:-$(mktemp -d "${TMPDIR:-/tmp}/slurm_steps.XXXXXX")}
share=$((tasks / nodes)) more=$((tasks % nodes))
here=$((share + (SLURM_NODEID < more))) first=$((SLURM_NODEID * share + (SLURM_NODEID < more ? SLURM_NODEID : more)))
local=0
if [ -n "${COTENANT_SLURM_STEP:-}" ]; then
    export SLURM_STEP_ID="$COTENANT_SLURM_STEP"
else
    step=0
    until mkdir "$shared/step.$step" 2> /dev/null; do step=$((step + 1)); done
    export SLURM_STEP_ID="$step"
fi
export SLURM_STEPID="$SLURM_STEP_ID" SLURM_NTASKS="$tasks" SLURM_NPROCS="$tasks" SLURM_STEP_NUM_TASKS="$tasks"
export SLURM_STEP_NUM_NODES="$nodes" SLURM_STEP_NODELIST="${SLURM_JOB_NODELIST:-$SLURMD_NODENAME}"
place="$shared/step.$SLURM_STEP_ID" opened=
open_file() {  # empties the file that a pattern names once, and sets `file` to it
    expand "$1"
    case " $opened " in *" $file "*) return ;; esac
    opened="$opened $file"
    case $1 in *%*[tnN]*) ;; *) [ "$SLURM_NODEID" = 0 ] || return ;; esac
    ( : > "$file" ) 2> /dev/null || usage "Could not open output file $file"
}
task() {  # becomes one task
    if [ -n "$out" ]; then exec >> "$out"; [ -n "$err" ] || exec 2>&1; fi
    if [ -n "$err" ]; then exec 2>> "$err"; fi
    if [ -n "$label" ]; then
        exec 3>&1
        exit "$( { { "$@" 2>&1 3>&- 4>&-; echo $? >&4; } | sed "s/^/$SLURM_PROCID: /" >&3; } 4>&1)"
    fi
    exec "$@"
}
[ "$SLURM_NODEID" = 0 ] || exec >> "$place/out.$SLURM_NODEID" 2>&1
export WORLD_SIZE="$tasks" LOCAL_WORLD_SIZE="$here" NODE_RANK="$SLURM_NODEID"
devices=${CUDA_VISIBLE_DEVICES:-}
trap : HUP INT QUIT USR1 USR2 ALRM TERM  # the tasks get them as well, and decide
pids=
while [ "$local" -lt "$here" ]; do
    export SLURM_PROCID=$((first + local)) SLURM_LOCALID="$local" RANK=$((first + local)) LOCAL_RANK="$local"
    out= err=
    [ -n "$output" ] && { open_file "$output"; out=$file; }
    [ -n "$error" ] && { open_file "$error"; err=$file; }
    if [ -n "$devices" ] && [ -n "${SLURM_GPUS_PER_TASK:-}" ]; then
        begin=$((local * SLURM_GPUS_PER_TASK + 1))
        export CUDA_VISIBLE_DEVICES="$(echo "$devices" | cut -d, -f "$begin-$((begin + SLURM_GPUS_PER_TASK - 1))")"
    fi
    local=$((local + 1))
    if [ "$here$nodes" = 11 ]; then
        ( task "$@" )
        status=$?
    else
        ( task "$@" ) &
        pids="$pids $!"
    fi
done
if [ "$nodes" -gt 1 ] && [ "$SLURM_NODEID" = 0 ]; then
    (
        # a node has its own of these
        unset RANK LOCAL_RANK NODE_RANK LOCAL_WORLD_SIZE WORLD_SIZE CUDA_VISIBLE_DEVICES TMPDIR HOSTNAME SLURM_NODEID \
            SLURMD_NODENAME SLURM_JOB_GPUS SLURM_GPUS_ON_NODE SLURM_CPUS_ON_NODE SLURM_TASK_PID SLURM_PROCID \
            SLURM_LOCALID COTENANT_PROGRESS COTENANT_CORES COTENANT_SCRATCH COTENANT_SLURM_SRUN
        export -p
        printf 'cd%s\nset --%s\n' "$(quoted "$begun_in")" "$original"
    ) > "$place/.go" && mv "$place/.go" "$place/go"
fi
relay() {  # prints what the tasks of other nodes write until they have ended
    trap '' HUP INT QUIT USR1 USR2 ALRM TERM
    pending=1
    while [ "$pending" = 1 ]; do
        pending=0 node=1
        while [ "$node" -lt "$nodes" ]; do
            [ -e "$place/status.$node" ] || pending=1
            written=$(cat "$place/out.$node" 2> /dev/null | wc -c) shown=0
            [ ! -e "$place/shown.$node" ] || shown=$(cat "$place/shown.$node")
            if [ "$written" -gt "$shown" ]; then
                tail -c "+$((shown + 1))" "$place/out.$node" | head -c "$((written - shown))"
                echo "$written" > "$place/shown.$node"
            fi
            node=$((node + 1))
        done
        [ "$pending" = 0 ] || sleep 0.2
    done
}
relaying=
if [ "$nodes" -gt 1 ] && [ "$SLURM_NODEID" = 0 ]; then
    relay &
    relaying=$!
fi
worst=${status:-0}
for pid in $pids; do
    while wait "$pid"; status=$?; kill -0 "$pid" 2> /dev/null; do :; done  # a signal ends only the wait
    [ "$status" -le "$worst" ] || worst=$status
done
if [ "$SLURM_NODEID" -gt 0 ]; then
    echo "$worst" > "$place/.status.$SLURM_NODEID" && mv "$place/.status.$SLURM_NODEID" "$place/status.$SLURM_NODEID"
    exit "$worst"
fi
[ -z "$relaying" ] || while wait "$relaying"; kill -0 "$relaying" 2> /dev/null; do :; done
node=1
while [ "$node" -lt "$nodes" ]; do
    status=$(cat "$place/status.$node") node=$((node + 1))
    [ "$status" -le "$worst" ] || worst=$status
done
[ -n "${COTENANT_SLURM_STEPS:-}" ] || rm -rf "$shared"
[ "$worst" = 0 ] || echo "srun: error: $SLURMD_NODENAME: Exited with exit code $worst" >&2
exit "$worst"
