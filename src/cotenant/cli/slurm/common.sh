# Functions of batch.sh and srun.sh.
number() {  # sets `number` to the number of a job id without an index, as cotenant.core.model.job_number does
    left=$1 number=0
    while [ -n "$left" ]; do
        digit=${left%"${left#?}"} left=${left#?} below=0123456789abcdefghjkmnpqrstvwxyz
        below=${below%%"$digit"*}
        number=$((number * 32 + ${#below}))
    done
}
count() {  # prints how many words a comma-separated list has
    (IFS=,; set -f; set -- $1; echo $#)
}
expand() {  # sets `file` to what a file name pattern means here
    left=$1 file=
    while :; do
        case $left in
            *%*) file=$file${left%%\%*} left=${left#*%} ;;
            *) file=$file$left; return ;;
        esac
        width=${left%%[!0-9]*} left=${left#"${left%%[!0-9]*}"}
        letter=${left%"${left#?}"} left=${left#?}
        case $letter in
            %) value=% ;;
            A) value=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} ;;
            a) value=${SLURM_ARRAY_TASK_ID:-4294967294} ;;
            j) value=$SLURM_JOB_ID ;;
            J) value=$SLURM_JOB_ID${SLURM_STEP_ID:+.$SLURM_STEP_ID} ;;
            N) value=$SLURMD_NODENAME ;;
            n) value=$SLURM_NODEID ;;
            s) value=${SLURM_STEP_ID:-batch} ;;
            t) value=$SLURM_PROCID ;;
            u) value=$SLURM_JOB_USER ;;
            x) value=$SLURM_JOB_NAME ;;
            *) value=%$width$letter width= ;;
        esac
        case $letter in
            [AajJnst]) width=${width#0}; while [ ${#value} -lt $((${width:-0} < 10 ? ${width:-0} : 10)) ]; do value=0$value; done ;;
        esac
        file=$file$value
    done
}
