#!/bin/sh
# Builds the kernels (cubins) and the harness programs with nvcc alone.
#   build.sh FOLDER [ARCH [LIST]]    ARCH: 90a and the like; LIST: decode variants "D KEY VALUE IO BLOCKS SOFTCAP"
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1 arch=${2:-90a} list=${3:-}
jobs=$(nproc 2>/dev/null || echo 4)
mkdir -p "$out"
if [ -z "$list" ]; then
    # what check_decode and time_decode ask for
    list=$(for d in 48 64 80 96 128 160 192 256; do for f in "3 5" "2 5" "4 5" "4 6" "2 2" "0 0" "1 1"; do
        case "$d $f" in 80\ 4*|96\ 4*|48\ [!3]*|160\ [!3]*) continue ;; esac
        case $f in 0*) io=0 ;; *) io=1 ;; esac
        echo "$d $f $io 1 0"
        echo "$d $f $io 2 0"
        case $d in 64|128|256)
            echo "$d $f $io 1 1"
            case $f in 0*|1*) ;; *) echo "$d $f 0 1 0" ;; esac
        esac
    done; done)
fi
echo "$list" | xargs -P "$jobs" -L 1 sh -c '
    nvcc -O3 -std=c++17 -cubin -gencode=arch=compute_$1,code=sm_$1 -DTQ_D=$3 -DTQ_KEY=$4 -DTQ_VALUE=$5 -DTQ_IO=$6 \
        -DTQ_BLOCKS=$7 -DTQ_SOFTCAP=$8 '"${TQ_FLAGS:-}"' "$2/../decode.cu" -o "$0/decode_d$3_k$4_v$5_io$6_b$7_s$8.cubin"' "$out" "$arch" "$here"
stores=${STORES:-$(for d in $(seq 16 16 256); do for f in "3 5" "2 5" "4 5" "4 6" "2 2" "0 0" "1 1"; do for io in 0 1; do
    case $d in 64|80|96|128|192|256) ;; *) [ "$f" = "3 5" ] || continue ;; esac
    case "$d $f" in 80\ 4*|96\ 4*) continue ;; esac
    case "$io $f" in "0 1 1"|"1 0 0") continue ;; esac
    echo "$d $f $io"
done; done; done)}
echo "$stores" | xargs -P "$jobs" -L 1 sh -c '
    nvcc -O3 -std=c++17 -cubin -gencode=arch=compute_$1,code=sm_$1 -DTQ_D=$3 -DTQ_KEY=$4 -DTQ_VALUE=$5 -DTQ_IO=$6 \
        "$2/../store.cu" -o "$0/store_d$3_k$4_v$5_io$6.cubin"' "$out" "$arch" "$here"
for program in ${PROGRAMS:-check_store check_decode time_store time_decode}; do
    nvcc -O2 -std=c++17 -gencode=arch=compute_$arch,code=sm_$arch "$here/$program.cu" -o "$out/$program" -lcuda
done
