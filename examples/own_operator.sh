#!/usr/bin/env bash
# custom-ops: write a package with one operator, build it, run its tests.
#
#   bash examples/own_operator.sh NAME [FOLDER]
set -euo pipefail
name=${1:?a name of lower-case letters, digits and underscores}
folder=${2:-.}
python=${PYTHON:-python}

"$python" -m custom_ops new "$name" --folder "$folder"
cd "$folder/$name"
"$python" setup.py --quiet build_ext --inplace
PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q
