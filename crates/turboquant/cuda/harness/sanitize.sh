#!/bin/sh
# Runs compute-sanitizer's memcheck and racecheck over small subsets of the checks; exits 1 if anything is found.
#   sanitize.sh FOLDER TESTDATA_FOLDER [ARCH]    FOLDER: what build.sh made
# racecheck takes only a thread's own arrival at an mbarrier for an order between its accesses and others', so it
# runs over prefill by wgmma in kernels where every lane of a warp arrives (TQ_ARRIVING_LANES), built here.
set -u
here=$(cd "$(dirname "$0")" && pwd)
kernels=$1 testdata=$2 arch=${3:-90a} bad=0
subset="64,128 4bit_nc,fp8 quick"
check() {  # TOOL PROGRAM ARGUMENTS
    tool=$1 program=$2
    shift 2
    echo "== $tool: $program"
    compute-sanitizer --tool "$tool" --error-exitcode 3 "$kernels/$program" "$@" || bad=1
}
for tool in memcheck racecheck; do
    check $tool check_store "$kernels" "$testdata" --small
    check $tool check_decode "$kernels" --small
    # shellcheck disable=SC2086
    check $tool check_prefill "$kernels" mma $subset
done
if [ "$arch" = 90a ]; then
    # shellcheck disable=SC2086
    check memcheck check_prefill "$kernels" wgmma $subset
    wgmma=$(for d in 64 128; do for row in "3 5" "2 2"; do for io in 0 1; do echo "wgmma $d $row $io 0"; done; done; done)
    FAMILIES=prefill PREFILLS=$wgmma PROGRAMS= TQ_FLAGS=-DTQ_ARRIVING_LANES=32 "$here/build.sh" "$kernels/arriving" "$arch" || bad=1
    # shellcheck disable=SC2086
    check racecheck check_prefill "$kernels/arriving" wgmma $subset
fi
[ "$bad" = 0 ] && echo "sanitize: clean" || echo "sanitize: FAILED"
exit "$bad"
