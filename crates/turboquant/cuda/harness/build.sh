#!/bin/sh
# Builds the kernels (cubins) and the harness programs with nvcc alone.
#   build.sh FOLDER [ARCH [LIST]]    ARCH: 90a and the like; LIST: decode variants "D KEY VALUE IO BLOCKS SOFTCAP"
# Environment, all optional:
#   FAMILIES   of "decode store prefill": those kernels and their programs (check_store with vLLM's rows needs decode too)
#   DIMS       only these head_dims, for instance "64 128"
#   STORES     store variants, "D KEY VALUE IO" each; PREFILLS: prefill variants, "PATH D KEY VALUE IO SOFTCAP" each
#   PROGRAMS   programs; "" for none
#   TQ_FLAGS   more options for the kernels
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1 arch=${2:-90a} decodes=${3:-}
families=${FAMILIES:-decode store prefill} dims=${DIMS:-48 64 80 96 128 160 192 256}
jobs=$(nproc 2>/dev/null || echo 4)
mkdir -p "$out"
builds() { case " $families " in *" $1 "*) ;; *) return 1 ;; esac; }

# Every row format at every head_dim that takes it: "D KEY VALUE".
rows=$(for d in $dims; do for f in "3 5" "2 5" "4 5" "4 6" "2 2" "0 0" "1 1"; do
    case "$d $f" in 80\ 4*|96\ 4*|48\ [!3]*|160\ [!3]*) continue ;; esac
    echo "$d $f"
done; done)
# What the programs ask for: fp16 activations (bf16 for bf16 rows), with a soft cap and with bf16
# activations at some head_dims.   each_row COMMAND: COMMAND D KEY VALUE IO SOFTCAP
each_row() {
    echo "$rows" | while read -r d k v; do
        io=1; [ "$k" != 0 ] || io=0
        "$1" "$d" "$k" "$v" $io 0
        case $d in 64|128|256) "$1" "$d" "$k" "$v" $io 1; [ "$k" -lt 2 ] || "$1" "$d" "$k" "$v" 0 0 ;; esac
    done
}
decode_of() {
    echo "$1 $2 $3 $4 1 $5"
    [ "$5" = 1 ] || { [ "$2" -ge 2 ] && [ "$4" = 0 ]; } || echo "$1 $2 $3 $4 2 $5"
}
prefill_of() {
    echo "mma $*"
    [ "$arch" = 90a ] || return 0
    # as serves_prefill in gpu.h
    case "$1 $2" in 256\ [01]) ;; 64*|128*|192*|256*) echo "wgmma $*" ;; esac
}
if builds decode && [ -z "$decodes" ]; then decodes=$(each_row decode_of); fi
stores= prefills= programs=
if builds store; then
    # and 4bit_nc at every head_dim, for the scalar reference's pages
    [ -n "${DIMS:-}" ] || others=$(for d in 16 32 112 144 176 208 224 240; do echo "$d 3 5"; done)
    stores=${STORES:-$(printf '%s\n' "$rows" ${others:+"$others"} | while read -r d k v; do for io in 0 1; do
        case "$io $k" in "0 1"|"1 0") ;; *) echo "$d $k $v $io" ;; esac
    done; done)}
fi
if builds prefill; then prefills=${PREFILLS:-$(each_row prefill_of)}; fi
for family in $families; do programs="$programs check_$family time_$family"; done

# One line a job: a cubin's name, source and macros, or a program. The slow ones first.
{
    [ -z "$prefills" ] || echo "$prefills" | while read -r path d k v io s; do
        case $s in 1|true) s=1 cap=true ;; *) s=0 cap=false ;; esac
        echo "prefill_${path}_d${d}_k${k}_v${v}_io${io}_s$s prefill_$path.cu -DTQ_D=$d -DTQ_KEY=$k -DTQ_VALUE=$v -DTQ_IO=$io -DTQ_SOFTCAP=$cap"
    done
    for program in ${PROGRAMS-$programs}; do echo "$program program"; done
    [ -z "$decodes" ] || echo "$decodes" | while read -r d k v io b s; do
        echo "decode_d${d}_k${k}_v${v}_io${io}_b${b}_s$s decode.cu -DTQ_D=$d -DTQ_KEY=$k -DTQ_VALUE=$v -DTQ_IO=$io -DTQ_BLOCKS=$b -DTQ_SOFTCAP=$s"
    done
    [ -z "$stores" ] || echo "$stores" | while read -r d k v io; do
        echo "store_d${d}_k${k}_v${v}_io$io store.cu -DTQ_D=$d -DTQ_KEY=$k -DTQ_VALUE=$v -DTQ_IO=$io"
    done
} | xargs -P "$jobs" -L 1 sh -c '
    out=$0 target="-gencode=arch=compute_$1,code=sm_$1" here=$2 name=$3 source=$4
    shift 4
    if [ "$source" = program ]; then
        exec nvcc -O2 -std=c++17 "$target" "$here/$name.cu" -o "$out/$name" -lcuda
    fi
    exec nvcc -O3 -std=c++17 -cubin "$target" "$@" '"${TQ_FLAGS:-}"' "$here/../$source" -o "$out/$name.cubin"' "$out" "$arch" "$here"
