#!/usr/bin/env bash
# Refits of a real SGLang server on two GPUs, in one call of at most 8 minutes: tests/lanes/gpu/run.sh [FLAGS OF refit.py]
# The interpreter, `python3` or $PYTHON, needs sglang and Sluice's own packages. Prints JSON lines; logs go to $OUT.
set -uo pipefail
cd "$(dirname "$0")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=$(command -v "${PYTHON:-python3}")
timeout --kill-after=10 480 "$python" -m tests.lanes.gpu.refit --python "$python" "$@"
