#!/usr/bin/env bash
# Random programs against an oracle, lens by lens: docs/random_programs.md says what each lens compares.
#
#   ./scripts/fuzz.sh                                 every lens, until all wanted programs have been run
#   ./scripts/fuzz.sh --seconds 60                    a minute in all, shared by the lenses
#   ./scripts/fuzz.sh --seed 7 dispatcher-trace       one lens, from another seed
#   ./scripts/fuzz.sh --record                        the figures go into docs/random_programs.md; a run that ended early adds
#                                                     to those of the same commit from other seeds
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

options=() tests=()
while (($#)); do
    case $1 in
        --seconds | --seed)
            [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "fuzz: $1 takes a whole number, not '${2:-}'" >&2; exit 2; }
            options+=("--fuzz-${1#--}" "$2"); shift 2 ;;
        --record) options+=(--fuzz-record); shift ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *)
            files=(framework-internals/"$1"/tests/test_random_*.py)
            [[ -f ${files[0]} ]] || { echo "fuzz: expected a lens with random programs, received '$1'; there are:" \
                "$(printf '%s\n' framework-internals/*/tests/test_random_programs.py | cut -d/ -f2 | paste -sd' ')" >&2; exit 2; }
            tests+=("${files[@]}"); shift ;;
    esac
done
((${#tests[@]})) || tests=(framework-internals/*/tests/test_random_*.py)
./scripts/setup.sh
exec ./scripts/python.sh -m pytest --capture=no -o faulthandler_timeout=0 -m fuzz "${options[@]}" "${tests[@]}"
