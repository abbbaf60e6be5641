#!/usr/bin/env bash
# Train on this machine: starts the ranks that the configuration asks for (one per GPU unless layout.ranks says so).
#
#   launch/local.sh CONFIG [key=value ...]
#
#   NPROC=4    number of ranks, instead of the configuration's
#
# Ctrl-C ends all ranks; when one fails, all end and its traceback is shown once.
set -euo pipefail
help() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
case "${1:-}" in "" | -h | --help) help; exit $(( $# == 0 ? 2 : 0 ));; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ ! -d "$root/.venv/bin" ] || PATH="$root/.venv/bin:$PATH"

config=$1; shift
exec python -m rl3d train "$config" ${NPROC:+--ranks "$NPROC"} "$@"
