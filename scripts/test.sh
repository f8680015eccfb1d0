#!/usr/bin/env bash
# Installs what is missing, then runs the tests from the project's folder. Takes pytest's arguments:
#   bash scripts/test.sh tests/test_buffer.py -k ledger
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
