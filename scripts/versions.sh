#!/usr/bin/env bash
# Tests this repository with other versions of Python, torch and jax (noxfile.py); writes framework-internals/versions/report.md.
#
#   ./scripts/versions.sh                                   every combination that this machine can install, with uv where
#                                                           it is installed; what was tried at this commit is not repeated
#   ./scripts/versions.sh --list                            what there is; arguments go to nox
#   ./scripts/versions.sh -p 3.12 -k "torch='2.13'"         only these
#   ./scripts/versions.sh -p 3.12 -- cuda fresh keep        builds of torch that download gigabytes of CUDA libraries; repeat
#                                                           what was tried; keep the environments in build/nox
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
./scripts/setup.sh versions

status=0
./scripts/python.sh -m nox "$@" || status=$?
[[ " $* " == *" --list "* || " $* " == *" -l "* ]] || ./scripts/python.sh scripts/version_matrix.py
exit "$status"
