#!/usr/bin/env bash
# Train with torchrun: run this on every node, with the same arguments.
#
#   launch/torchrun.sh CONFIG [key=value ...]
#
#   NPROC=8             ranks on this node (default: its number of GPUs, else 1)
#   NNODES=2            number of nodes (default 1)
#   NODE_RANK=0         number of this node, 0 .. NNODES-1 (needed when NNODES > 1)
#   MASTER_ADDR=host0   host of node 0 (needed when NNODES > 1)
#   MASTER_PORT=29500   a free port on it (one node: any free port is found)
#   HOSTFILE=file       instead of NNODES, NODE_RANK and MASTER_ADDR: one `host slots=N` per line, as for DeepSpeed;
#                       this node is the line with its host name
set -euo pipefail
help() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
case "${1:-}" in "" | -h | --help) help; exit $(( $# == 0 ? 2 : 0 ));; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ ! -d "$root/.venv/bin" ] || PATH="$root/.venv/bin:$PATH"

if [ -n "${HOSTFILE:-}" ]; then
    [ -r "$HOSTFILE" ] || { echo "HOSTFILE=$HOSTFILE: cannot be read" >&2; exit 2; }
    mapfile -t lines < <(sed 's/#.*//' "$HOSTFILE" | grep -v '^[[:space:]]*$')
    NNODES=${#lines[@]}
    MASTER_ADDR=${MASTER_ADDR:-${lines[0]%%[[:space:]]*}}
    for i in "${!lines[@]}"; do
        host=${lines[$i]%%[[:space:]]*}
        if [ "$host" = "$(hostname)" ] || [ "$host" = "$(hostname -s)" ]; then
            NODE_RANK=${NODE_RANK:-$i}
            [[ ${lines[$i]} =~ slots=([0-9]+) ]] && NPROC=${NPROC:-${BASH_REMATCH[1]}}
        fi
    done
    : "${NODE_RANK:?HOSTFILE=$HOSTFILE has no line for host $(hostname): set NODE_RANK}"
fi
NPROC=${NPROC:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)}
[ "$NPROC" -gt 0 ] || NPROC=1

nodes=(--standalone)  # one node: torchrun finds a port
if [ "${NNODES:-1}" -gt 1 ]; then
    : "${NODE_RANK:?NNODES=$NNODES: set NODE_RANK to the number of this node, 0 .. $((NNODES - 1))}"
    : "${MASTER_ADDR:?NNODES=$NNODES: set MASTER_ADDR to the host of node 0}"
    nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) / NPROC > 0 ? $(nproc) / NPROC : 1 ))}

config=$1; shift
trap '' USR1  # a scheduler's warning is for the ranks; torchrun itself would die of it
exec torchrun "${nodes[@]}" --nproc-per-node "$NPROC" -m rl3d train "$config" "$@"
