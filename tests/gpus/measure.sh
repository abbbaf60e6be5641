#!/usr/bin/env bash
# What docs/gpus.md reports, in parts: bash tests/gpus/measure.sh PART ... ; parts are the functions below, "one" and "two" are
# all that one and two GPUs are good for. Each command has a limit, so that one that hangs does not take the others with it;
# everything goes to $OUT/measure.log too (the working directory without OUT).
#
# Several ranks on one GPU want NCCL 2.30 or newer (LD_PRELOAD=.../libnccl.so.2) where torch brings an older one.
set -u
export PYTHONUNBUFFERED=1
START=$(date +%s)
PYTHON=${PYTHON:-python3}

run() { # run SECONDS NAME COMMAND...: at most so long, with its time
    local limit=$1 name=$2
    shift 2
    echo "=== $name, after $(($(date +%s) - START)) s: $*"
    timeout -k 5 "$limit" "$@" 2>&1 | grep -v -E 'Warning|warn\(|^$' | tail -40
    echo "--- ended with ${PIPESTATUS[0]} after $(($(date +%s) - START)) s"
}
bench() { # bench SECONDS NAME ARGUMENTS...
    local limit=$1 name=$2
    shift 2
    run "$limit" "$name" "$PYTHON" -m rl3d bench "$@"
}

LLAMA_1B="llama3-8b --shape hidden_size=2048 intermediate_size=8192 num_hidden_layers=16 num_attention_heads=32
 num_key_value_heads=8 head_dim=64"
BATCH="--batch 64 --prompt-len 256 --response-len 128"
STEP="qwen2.5-1.5b --prompts 16 --samples 8 --prompt-len 256 --response-len 256"

checks() { # two minutes
    run 150 kernels "$PYTHON" -m tests.kernels.checks cuda
    run 150 fused "$PYTHON" -m tests.generation.fused_checks cuda
    run 60 elastic "$PYTHON" -m tests.generation.elastic_checks cuda
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True run 60 elastic-expandable "$PYTHON" -m tests.generation.elastic_checks cuda
}
generate() { # three minutes
    bench 120 qwen-1.5b generate qwen2.5-1.5b --batch 1,32,64,128,256
    bench 60 nucleus generate qwen2.5-1.5b --batch 128 --temperature 0.7 --top-p 0.9
    bench 60 top-k generate qwen2.5-1.5b --batch 128 --top-k 50
    bench 80 llama-7b generate llama2-7b --batch 1,32,128
    bench 80 qwen-7b generate qwen2.5-7b --batch 128,256
}
ends() { # one minute: sequences that end at random, with and without others that wait
    bench 60 ends generate qwen2.5-1.5b --batch 128 --ends 200
    bench 60 ends-slots generate qwen2.5-1.5b --batch 512 --slots 128 --ends 200
}
agreement() { bench 90 agreement agreement qwen2.5-1.5b --prompts 64 --prompt-len 128 --new 128 --slots 1,16; }
transformers() { bench 90 transformers generate qwen2.5-1.5b --engine megatron,hf --batch 64 --new 128; }
switches() { # eight ranks on one GPU
    export RL3D_SHARE_GPU=1
    local ours="switch llama2-7b --ranks 8 --transport ipc --device cuda --only-ours"
    bench 130 switch-8 $ours --train tp2.pp2.zero1 tp8.zero1 tp4.pp2.zero1 tp1.zero3 --gen tp4 tp2 tp2 tp4
    bench 60 switch-8-partitions $ours --train tp2.zero1:partitions --gen tp4
    bench 110 switch-8-messages switch llama2-7b --shape num_hidden_layers=2 --ranks 8 --transport nccl --device cuda \
        --only-ours --repeats 2 --train tp2.pp2.zero1 --gen tp4
    unset RL3D_SHARE_GPU
}
first() {
    bench 80 first-adaptive first_batch qwen2.5-1.5b $BATCH --device cuda --cache-strategy adaptive
    bench 80 first-full first_batch qwen2.5-1.5b $BATCH --device cuda --cache-strategy full
    local rounds="first_batch $LLAMA_1B tie_word_embeddings=true --later 1 --batch 8 --prompt-len 64 --response-len 16
 --device cuda --rounds 50 --cache-strategy adaptive"
    bench 70 rounds-1 $rounds
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True bench 70 rounds-1-expandable $rounds
}
rounds() { # fifty rounds of eight ranks that take turns on one GPU: seven minutes
    RL3D_SHARE_GPU=1 bench 480 rounds-8 first_batch $LLAMA_1B vocab_size=32000 tie_word_embeddings=false --later 1 --batch 8 \
        --prompt-len 64 --response-len 8 --device cuda --ranks 8 --train tp1.pp8.zero1 --gen tp1 --rounds 50 \
        --cache-strategy adaptive
}
step() { bench 75 step step $STEP --steps 12; }
shared() { # what two ranks do, on one GPU
    RL3D_SHARE_GPU=1 RL3D_TEST_DEVICE=cuda run 150 greedy "$PYTHON" -m pytest -q -s -x -p no:cacheprovider -m slow \
        tests/gpus/test_two.py -k "greedy or verified"
}
two_checks() { RL3D_TEST_DEVICE=cuda run 500 two "$PYTHON" -m pytest -q -s -x -p no:cacheprovider -m slow tests/gpus; }
two_switches() {
    local pairs="--train tp2.zero1 tp1.pp2.zero1 tp1.pp2.zero1 tp1.zero3 tp1.zero1:partitions tp1.zero1
 --gen tp1 tp2 tp1 tp2 tp2 tp2"
    bench 150 switch-2 switch llama2-7b --ranks 2 --device cuda --repeats 3 $pairs
    bench 150 switch-2-messages switch llama2-7b --ranks 2 --device cuda --repeats 3 --transport nccl --only-ours $pairs
}
two_generate() {
    bench 90 tp2-1.5b generate qwen2.5-1.5b --tp 2 --batch 1,32,128,256
    bench 90 tp2-7b generate llama2-7b --tp 2 --batch 1,32,128
    bench 90 tp2-agreement agreement qwen2.5-1.5b --prompts 64 --prompt-len 128 --new 128 --slots 16 --tp 1,2
    bench 90 tp2-first first_batch qwen2.5-1.5b --ranks 2 --train tp1.pp2.zero1 --gen tp2 $BATCH --device cuda \
        --cache-strategy adaptive
}
two_steps() {
    bench 120 dp2 step $STEP --ranks 2 --train tp1.dp2.zero2 --gen tp1 --steps 21
    bench 120 tp2 step $STEP --ranks 2 --train tp2.zero1 --gen tp1 --set layout.sequence_parallel=true --steps 21
}
one() { checks; generate; ends; agreement; first; switches; step; transformers; }
two() { two_checks; two_switches; two_generate; two_steps; }

main() {
    [ $# -gt 0 ] || { echo "usage: bash tests/gpus/measure.sh PART ...; parts: $(declare -F | awk '{print $3}' | tr '\n' ' ')"; exit 2; }
    for part in "$@"; do
        declare -F "$part" >/dev/null || { echo "measure.sh: no part '$part'"; exit 2; }
        "$part"
    done
}
main "$@" 2>&1 | tee -a "${OUT:-.}/measure.log"
exit "${PIPESTATUS[0]}"
