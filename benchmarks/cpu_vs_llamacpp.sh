#!/usr/bin/env bash
# Prefill and decode tokens/s of turboquant and of llama.cpp on the same GGUF, prompts and threads,
# run in turn. Usage: cpu_vs_llamacpp.sh LLAMA_COMPLETION MODEL.gguf REPEATS PROMPT.txt...
set -euo pipefail
llama=$1 model=$2 repeats=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
ours=$here/target/release/turboquant
threads=${THREADS:-2} new=${NEW_TOKENS:-48}

for prompt in "$@"; do
  for ((i = 1; i <= repeats; i++)); do
    for kv in ${PEER_KV-f16 q8_0 q4_0}; do
      "$llama" -m "$model" -f "$prompt" -c 8192 -n "$new" -t "$threads" -fa on -ctk "$kv" -ctv "$kv" \
        --temp 0 --ignore-eos -no-cnv 2>&1 >/dev/null |
        sed -nE 's/.*prompt eval time.*\/ +([0-9]+) tokens.* ([0-9.]+) tokens per second.*/\1 prefill \2/p; s/.*[^t] eval time.* ([0-9.]+) tokens per second.*/decode \1/p' |
        tr '\n' ' ' | sed "s|^|$(basename "$prompt") run $i llama.cpp $kv: |"
      echo
    done
    for kv in ${OUR_KV-auto fp8 turboquant_k8v4 turboquant_4bit_nc turboquant_k3v4_nc turboquant_3bit_nc}; do
      "$ours" run -m "$model" --raw --prompt-file "$prompt" --max-model-len 8192 --max-tokens "$new" \
        --ignore-eos --threads "$threads" --kv-cache-dtype "$kv" ${OUR_FLAGS-} 2>&1 >/dev/null |
        grep -E '^(prefill|decode)' | tr '\n' ' ' | sed "s|^|$(basename "$prompt") run $i turboquant $kv: |"
      echo
    done
  done
done
