#!/usr/bin/env bash
# The main job: set-up, every subproject's scripts/run.py, the end-to-end step, a summary, and the index of reports. Reports
# go to reports/own-<machine>/ of every lens, their index to framework-internals/THIS_MACHINE.md; git ignores both.
#
#   ./scripts/run_all.sh                      within 12 minutes, on the GPU where there is one; says what it left out
#   ./scripts/run_all.sh --budget 30m         another limit; --full has none. Set-up and first builds are counted apart
#   ./scripts/run_all.sh --only custom-ops    one job (may be repeated)
#   ./scripts/run_all.sh --quick              fewer and smaller measurements, within three minutes
#   ./scripts/run_all.sh --publish            the reports go to reports/<machine>/, and the committed index is written
#   ./scripts/run_all.sh --fresh              what a run that was ended has done already, too: without it a run goes on there
#   SETUP=0 PYTHON=python3 ./scripts/run_all.sh --device cuda   in a ready environment, nothing installed
set -euo pipefail
[[ " $* " == *" -h "* || " $* " == *" --help "* ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
./scripts/setup.sh
exec ./scripts/python.sh scripts/run_all.py "$@"
