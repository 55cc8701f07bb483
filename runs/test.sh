#!/usr/bin/env bash
# Style and tests, from a fresh clone: makes .venv, installs requirements-dev.txt, runs ruff and pytest, in one process per core
# (at most four) with one thread each, because more threads than cores wait for each other.
set -euo pipefail
REQUIREMENTS=requirements-dev.txt
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ruff check .
ruff format --check .
export OMP_NUM_THREADS=1
python -m pytest -q --numprocesses=auto --maxprocesses=4 --dist=worksteal "$@"
