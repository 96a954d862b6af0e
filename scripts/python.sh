#!/usr/bin/env bash
# The Python of this repository: .venv's, or, with SETUP=0, an existing one (PYTHON=…, python3 by default) with every
# package's src folder put on its path, so that nothing has to be installed.
#
#   ./scripts/python.sh -m torch_baseline train --preset tiny
#   SETUP=0 PYTHON=python3 ./scripts/python.sh framework-internals/rmsnorm-fused/scripts/run.py --device cuda
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

if [[ ${SETUP:-1} == 0 ]]; then
    for src in "$root/shared/src" "$root"/framework-internals/*/src; do
        PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$src"
    done
    export PYTHONPATH
    command -v "${PYTHON:-python3}" >/dev/null || { echo "python.sh: PYTHON=${PYTHON:-python3} is no program; name a Python that has the packages (SETUP=0 installs nothing)" >&2; exit 1; }
    exec "${PYTHON:-python3}" "$@"
fi
[[ -x $root/.venv/bin/python ]] || { echo "python.sh: no .venv yet; run ./scripts/setup.sh first (or SETUP=0 for an existing environment)" >&2; exit 1; }
exec "$root/.venv/bin/python" "$@"
