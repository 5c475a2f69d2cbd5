#!/usr/bin/env bash
# Every GPU check that this machine has GPUs for, in one call: tests/lanes/gpu/run.sh [INTERPRETER WITH SGLANG]
# Without an interpreter only the embedded engine is checked. Logs go to $OUT, if that is set.
set -uo pipefail
cd "$(dirname "$0")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
count=$(python3 -c 'import torch; print(torch.cuda.device_count())')
failed=0
check() { echo "== $*"; timeout 280 python3 -m tests.lanes.gpu.refit "$@" || { failed=1; echo "FAILED: $*"; }; }
check ipc --engine torch --refits 4
[ "$count" -lt 2 ] || check nccl --engine torch --refits 4
if [ $# -gt 0 ]; then
  check ipc --python "$1"
  [ "$count" -lt 2 ] || check nccl --python "$1"
fi
exit $failed
