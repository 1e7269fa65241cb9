#!/bin/sh
# Runs compute-sanitizer's memcheck and racecheck over small subsets of the checks; exits 1 if anything is found.
#   sanitize.sh FOLDER TESTDATA_FOLDER    FOLDER: what build.sh made
set -u
kernels=$1 testdata=$2 bad=0
for tool in memcheck racecheck; do
    for check in "check_store $kernels $testdata --small" "check_decode $kernels --small" \
        "check_prefill $kernels mma,wgmma 64,128 4bit_nc,fp8 quick"; do
        echo "== $tool: ${check%% *}"
        # shellcheck disable=SC2086
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$kernels"/$check || bad=1
    done
done
[ "$bad" = 0 ] && echo "sanitize: clean" || echo "sanitize: FAILED"
exit "$bad"
