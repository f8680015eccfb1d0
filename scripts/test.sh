#!/usr/bin/env bash
# Installs what is missing, then runs the tests from the project's folder. Takes pytest's arguments:
#   bash scripts/test.sh tests/test_buffer.py -k ledger
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"
# tests/test_report.py looks at a page in a browser; where there is none it fails, and says so.
[[ -n "$(type -P chromium chromium-browser google-chrome)" ]] || { say "installing chromium (apt-get)" &&
  apt-get update -qq >&2 && apt-get install -y -qq chromium >&2; } || say "no chromium: tests/test_report.py will fail"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
