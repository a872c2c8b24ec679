#!/bin/bash
$options

set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$$SLURM_JOB_NODELIST")
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=$wait_s
export RAY_gcs_rpc_server_reconnect_timeout_s=$gone_s
# Before the job: a warning may come as soon as it has started.
trap $pause TERM
srun --wait=$last_s ray symmetric-run \
  --address "$${nodes[0]}:$ray_port" --min-nodes "$$SLURM_JOB_NUM_NODES" -- \
  $apply &
wait $$! || wait $$!
