#!/usr/bin/env bash
# Set-up, lint (ruff, mypy, import contracts), the committed reports against their results, tests.
#
#   ./scripts/test.sh               all of it but the tests marked slow, for an answer in minutes
#   ./scripts/test.sh --all         the slow tests too, and a minute of random programs (scripts/fuzz.sh)
#   ./scripts/test.sh --lint-only   no tests
#   ./scripts/test.sh PATH -k NAME  lint, then the chosen tests: the arguments go to pytest; a -m takes slow tests in
#
# The tests know no measured figure: those that read committed reports also run in a copy in which every figure, and every
# machine, is another (scripts/move_figures.py).
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
./scripts/setup.sh

python=./scripts/python.sh
if [[ $# == 0 || ${1:-} == --all ]]; then
    # What stands before the tests works on one core. The other one compiles the operators; tests that need them wait for
    # what is not done by then, and say why it cannot be.
    MAX_JOBS=1 $python -c 'import torch, custom_ops, rmsnorm_fused
custom_ops.load()
rmsnorm_fused.rms_norm(torch.ones(1, 1), eps=1e-6, backend="cpp")' >/dev/null 2>&1 &
    compiling=$!
    trap 'kill "$compiling" 2>/dev/null || true' EXIT # an interrupt does not reach what runs in the background
fi
if $python -c 'import ruff, mypy, importlinter' 2>/dev/null; then
    $python -m ruff check .
    $python -m ruff format --check .
    $python -m mypy
    $python -m mypy scripts/lenses.py scripts/run_all.py scripts/index_reports.py scripts/check_reports.py scripts/move_figures.py scripts/random_programs.py scripts/end_to_end.py scripts/version_matrix.py scripts/warm_python.py
    $python -c 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports(verbose=False))'
elif [[ ${SETUP:-1} == 0 ]]; then
    echo "test: ruff, mypy or import-linter is not in this environment: lint is left out (SETUP=0 installs nothing)"
else
    echo "test: ruff, mypy or import-linter cannot be imported; remove .venv/setup.stamp and run ./scripts/setup.sh" >&2
    exit 1
fi
[[ ${1:-} == --lint-only ]] && exit 0
if [[ $# == 0 || ${1:-} == --all ]]; then
    $python scripts/check_reports.py
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        $python scripts/move_figures.py
    else
        echo "test: no git checkout: no copy with moved figures is made"
    fi
fi
selection=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    shift
    selection=()
    ./scripts/fuzz.sh --seconds 60
elif [[ " $* " == *" -m "* ]]; then
    selection=()
fi
# Tests start hundreds of short processes; without bytecode each of them would compile the sources again, and pytest its
# tests.
unset PYTHONDONTWRITEBYTECODE
if [[ ${SETUP:-1} == 0 ]]; then
    $python -m pytest "${selection[@]}" "$@"
    exit
fi
# A process a core, each with one thread an operator: two threads of two processes on two cores wait for one another.
# In the order of pyproject.toml's testpaths from both ends, not the files with the fewest tests last: those hold the
# longest tests. A worker that crashes ends the run and is named: in place of one, pytest-xdist 3.8 may wait for ever.
parallel=(--numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0)
OMP_NUM_THREADS=1 $python -m pytest "${parallel[@]}" --durations 30 "${selection[@]}" "$@"
