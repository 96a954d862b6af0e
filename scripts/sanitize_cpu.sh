#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, at every instruction set that this processor has.
#
#   ./scripts/sanitize_cpu.sh                 with g++
#   CXX=clang++-15 ./scripts/sanitize_cpu.sh  with another compiler
#   ./scripts/sanitize_cpu.sh baseline avx2   at these instruction sets only
#
# The status is 1 if a sanitizer finds anything. The programs are tests/sanitized_kernels.cpp and shared/tests/native_build/simd.cpp.
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

levels=("baseline:")
if [[ $(uname -m) == x86_64 ]]; then
    has() { for flag; do grep -qw "$flag" /proc/cpuinfo || return 1; done; }
    has avx2 fma f16c bmi2 && levels+=("avx2:-march=x86-64-v3")
    has avx512f avx512bw avx512cd avx512dq avx512vl && levels+=("avx512:-march=x86-64-v4 -mprefer-vector-width=512")
    bfloat16="-march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512"
    # AMX by its emulation: a sanitizer does not see what the tiles' instructions read and write.
    has avx512f avx512_bf16 && levels+=("avx512_bf16:$bfloat16" "emulated_amx:$bfloat16 -DFLASH_ATTENTION_EMULATED_TILES")
fi
if [[ $# -gt 0 ]]; then
    chosen=()
    for name in "$@"; do
        for each in "${levels[@]}"; do [[ ${each%%:*} == "$name" ]] && chosen+=("$each") && continue 2; done
        echo "sanitize_cpu.sh: expected ${levels[*]%%:*}, got $name" >&2
        exit 2
    done
    levels=("${chosen[@]}")
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for each in "${levels[@]}"; do
    for source in framework-internals/{custom-ops,rmsnorm-fused}/tests/sanitized_kernels.cpp shared/tests/native_build/simd.cpp; do
        kernels=()
        [[ $source == *custom-ops* ]] && mapfile -t kernels < <(find framework-internals/custom-ops/csrc -name cpu.cpp)
        # shellcheck disable=SC2086  # the level's flags are several words
        "${CXX:-g++}" -std=c++17 -O1 -g -fopenmp-simd -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
            -Ishared/src/native_build/include ${each#*:} "$source" "${kernels[@]}" -o "$folder/program"
        echo "sanitize-cpu: ${each%%:*}: $source"
        "$folder/program"
    done
done
echo "sanitize-cpu: nothing found (${CXX:-g++}: ${levels[*]%%:*})"
