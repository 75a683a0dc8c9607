#!/bin/bash
# Starts one torchrun on every node of a PBS job, one rank each, which meet at the first node.
set -euo pipefail

: "${PBS_NODEFILE:?not inside a PBS job: qsub submit_2nodes_prof.pbs}"
command -v mpiexec >/dev/null || { echo "mpiexec is not on PATH: load the MPI module" >&2; exit 1; }

num_nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
first_node=$(head -n 1 "$PBS_NODEFILE")

# The network between nodes is Slingshot; NCCL without its plugin falls back to TCP sockets, which costs far more.
export NCCL_NET="${NCCL_NET:-AWS Libfabric}" FI_CXI_DISABLE_HOST_REGISTER=1 NCCL_DEBUG="${NCCL_DEBUG:-INFO}"

mpiexec -n "$num_nodes" --ppn 1 \
    torchrun --nnodes="$num_nodes" --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint="$first_node:29500" \
    pytorch_ddp_prof.py
