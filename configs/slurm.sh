#!/bin/bash
# A job on several machines under SLURM: one torchrun per machine, which starts one process per GPU.
#
#     sbatch --nodes 4 configs/slurm.sh configs/gla_7B.toml --job.dump_folder=/shared/gla_7B --checkpoint.save_on_signal
#
# Submit it from the repository's folder. All machines have to share this folder and job.dump_folder. Two minutes before the
# time limit SLURM sends SIGTERM: with checkpoint.save_on_signal all ranks save, and the same command resumes from there.
#SBATCH --job-name=titanplans
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "${machines[0]}:${PORT:-29500}" \
    --max-restarts "${RESTARTS:-3}" \
    --shutdown-timeout 90 \
    train.py "$@"
