#!/usr/bin/env bash
# Makes .venv with every package of this repository installed editable. Idempotent: a second call returns at once.
#
#   ./scripts/setup.sh                            finds a Python 3.11-3.13 by itself
#   PYTHON=/path/to/python3.12 ./scripts/setup.sh uses that one
#   SETUP=0 PYTHON=python3 ./scripts/run_all.sh   installs nothing: runs in a ready environment (see scripts/python.sh)
#   ./scripts/setup.sh site                       also installs an extra of shared/, which only `make site`,
#                                                 `make versions` or `make notebooks` needs
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

readonly torch_version=2.13.0
readonly torch_cuda=13  # of the build that the package index has under that version
readonly torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
readonly group=${1:-}
[[ $# -le 1 && $group =~ ^(site|versions|notebooks)?$ ]] || die "it takes no arguments but site, versions or notebooks, got $*; --help says what it does"

# A usable interpreter: 3.11 to 3.13, able to make virtual environments.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11-3.13 with the venv module; name another, or unset PYTHON"
        echo "$PYTHON"; return
    fi
    for candidate in python3 python3.11 python3.12 python3.13; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python 3.11-3.13 found; install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python"
}

report_compilers() {
    command -v "${CXX:-g++}" >/dev/null || say "no C++ compiler: C++ operators and compile-bench on a CPU are left out (remedy: apt-get install g++, or set CXX)"
    command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] \
        || say "no nvcc: CUDA C++ operators are left out (remedy: install the CUDA toolkit of your torch, or set CUDA_HOME)"
}

if [[ ${SETUP:-1} == 0 ]]; then
    ./scripts/python.sh - <<'CHECK' || exit 1
import importlib.util, sys
needed = "torch numpy jinja2 matplotlib rich typer filelock".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"setup: SETUP=0 installs nothing, and {sys.executable} lacks {', '.join(missing)}: install them there, or run without SETUP=0")
CHECK
    report_compilers
    exit 0
fi

flavour=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    driver=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
    if [[ -n $driver && $driver -lt $torch_cuda ]]; then
        say "the NVIDIA driver supports CUDA $driver, and torch $torch_version needs $torch_cuda: the CPU build is used (remedy: update the driver)"
    else
        flavour=cuda
    fi
fi

lenses=(framework-internals/*/pyproject.toml)
manifests=(constraints.txt scripts/setup.sh shared/pyproject.toml "${lenses[@]}")
stamp=".venv/setup.stamp"
state="$flavour $(cat "${manifests[@]}" | sha256sum | cut -d' ' -f1)"
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
up_to_date() {
    [[ -f $stamp && $(<"$stamp") == "$state" ]] && version_of .venv/bin/python >/dev/null \
        && [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$(version_of .venv/bin/python)" ]]
}
# Tools that building pages or trying versions needs, and nothing else: installed when they are first asked for.
install_group() {
    [[ -n $group ]] || return 0
    local stamp=".venv/$group.stamp" state
    state=$(cat constraints.txt shared/pyproject.toml | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$state" ]] && return 0
    say "the extra $group of shared/ -> .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --no-build-isolation --editable "shared[$group]"
    printf '%s' "$state" >"$stamp"
}
if up_to_date; then install_group; exit 0; fi

python=$(find_python)
exec 9>.venv.lock
flock 9                        # a second set-up at the same time waits for the first one,
if up_to_date; then install_group; exit 0; fi # and finds its work done

say "Python $(version_of "$python") -> .venv, torch $torch_version for $flavour"
if [[ $(version_of .venv/bin/python) != "$(version_of "$python")" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear .venv
fi
rm -f "$stamp"

pip=(.venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt)
[[ -t 2 ]] || pip+=(--quiet)

if [[ $flavour == cpu ]]; then
    # The local version pins the CPU build: the plain one would bring gigabytes of CUDA libraries.
    "${pip[@]}" "torch==$torch_version+cpu" 2>/dev/null \
        || "${pip[@]}" --index-url "$torch_cpu_index" "torch==$torch_version+cpu" \
        || die "pip got no CPU build of torch $torch_version for $("$python" --version) from the default index nor from $torch_cpu_index, for the reason above; without a network use a ready environment (SETUP=0 PYTHON=…), else another Python (PYTHON=…)"
else
    "${pip[@]}" "torch==$torch_version"
fi
"${pip[@]}" setuptools wheel
editable=(--editable "shared[dev]")
for manifest in "${lenses[@]}"; do
    extras=dev
    if [[ $flavour == cuda ]] && grep -q '^cuda = ' "$manifest"; then extras+=,cuda; fi
    editable+=(--editable "$(dirname "$manifest")[$extras]")
done
"${pip[@]}" --no-build-isolation "${editable[@]}"

report_compilers
printf '%s' "$state" >"$stamp"
install_group
say "done; ./scripts/run_all.sh runs everything, ./scripts/python.sh is this environment's Python"
