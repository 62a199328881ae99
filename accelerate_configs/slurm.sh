#!/bin/bash
# One run on several nodes of a Slurm cluster: sbatch accelerate_configs/slurm.sh RECIPE.yaml [key.path=value ...]
# Before the time limit the ranks save and end, and the job queues itself again; train.resume=auto goes on.
#SBATCH --nodes=2 --gpus-per-node=8 --ntasks-per-node=1 --cpus-per-task=64 --time=24:00:00
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:TERM@180            # to this shell, 180 seconds before the end

main=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
  --rdzv_backend c10d --rdzv_endpoint "$main:29500" --rdzv_id "$SLURM_JOB_ID" \
  recipes/lora.py "$@" train.resume=auto &
run=$!

preempted() {
  # To the ranks themselves: what torchrun is sent, it gives them 30 seconds for, and a checkpoint may take longer.
  srun --overlap --ntasks-per-node=1 \
    bash -c 'pkill -TERM -P "$(pgrep -d, -f "^[^ ]*python[^ ]* -m .*--rdzv_id $SLURM_JOB_ID ")"'
  wait $run
  scontrol requeue "$SLURM_JOB_ID"
}
trap preempted TERM
wait $run
