#!/usr/bin/env bash
# Train with DeepSpeed's launcher.
#
#   launch/deepspeed.sh CONFIG [key=value ...]
#
# One node:
#   NPROC=8             ranks (default: its number of GPUs, else 1)
# Several nodes, with passwordless ssh (or pdsh), started once on the first node:
#   HOSTFILE=file       one `host slots=N` per line
# Several nodes without ssh, started on every node with the same HOSTFILE:
#   NODE_RANK=0         number of this node, 0 .. number of lines-1
# For all:
#   MASTER_ADDR=host0   host of rank 0 (default: the first in HOSTFILE)
#   MASTER_PORT=29500   a free port on it
set -euo pipefail
help() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
case "${1:-}" in "" | -h | --help) help; exit $(( $# == 0 ? 2 : 0 ));; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ ! -d "$root/.venv/bin" ] || PATH="$root/.venv/bin:$PATH"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
port=(--master_port "${MASTER_PORT:-29500}")

if [ -n "${HOSTFILE:-}" ]; then
    [ -r "$HOSTFILE" ] || { echo "HOSTFILE=$HOSTFILE: cannot be read" >&2; exit 2; }
    first=$(sed 's/#.*//' "$HOSTFILE" | awk 'NF {print $1; exit}')
    where=(--hostfile "$HOSTFILE" --master_addr "${MASTER_ADDR:-$first}")
    if [ -n "${NODE_RANK:-}" ]; then where+=(--no_ssh --node_rank "$NODE_RANK"); else where+=(--force_multi); fi
else
    [ "${NNODES:-1}" -eq 1 ] || { echo "NNODES=$NNODES: DeepSpeed learns its nodes from HOSTFILE; set it" >&2; exit 2; }
    where=()  # the GPUs there are, or those in CUDA_VISIBLE_DEVICES
    if [ "$gpus" -eq 0 ]; then
        export LOCAL_SIZE=${NPROC:-1}  # what DeepSpeed takes for the number of devices on a CPU (it would count sockets)
        where=(--num_gpus "$LOCAL_SIZE")
    elif [ -n "${NPROC:-}" ]; then
        where=(--num_gpus "$NPROC")
    fi
fi

config=$1; shift
trap '' USR1  # a scheduler's warning is for the ranks; the launcher itself would die of it
exec deepspeed --log_level warning "${where[@]}" "${port[@]}" --no_local_rank --module rl3d train "$config" "$@"
