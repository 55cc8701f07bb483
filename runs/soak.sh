#!/usr/bin/env bash
# 5,000 tiny steps with an evaluation, a checkpoint and samples every 50, in one process: its memory must not grow. Minutes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[ -f data/stdlib/meta.json ] || python prepare_data.py text --out=data/stdlib
python -m runs.soak "$@"
