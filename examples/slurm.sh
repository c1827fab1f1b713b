#!/bin/bash
#SBATCH --job-name=coupled-adam
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
# A comparison on two nodes of eight GPUs, a process for each GPU. Five minutes before its time is
# over, SLURM sends SIGTERM; the runs write a checkpoint and end with 75, and the job is queued again.
#
#     sbatch slurm.sh 124M-5B /scratch/runs/124M-5B
set -u
recipe=$1 out=$2
export SLURM_KILL_BAD_EXIT=1 # the others would wait for a process that has failed

resume=()
if [ -e "$out/comparison.yaml" ]; then
    resume=(--resume)
fi
srun coupled-adam compare --recipe "$recipe" --out "$out" --strategy fsdp2 --micro-batch-size 8 \
    --compile ${resume[@]+"${resume[@]}"}
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
