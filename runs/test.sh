#!/usr/bin/env bash
# Style and tests, from a fresh clone: makes .venv, installs requirements-dev.txt, runs ruff and pytest.
set -euo pipefail
REQUIREMENTS=requirements-dev.txt
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ruff check .
ruff format --check .
python -m pytest -q "$@"
