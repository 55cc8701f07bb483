#!/usr/bin/env bash
# From nothing to a trained model by one command: bash runs/pretrain.sh config/NAME.py. A tokenizer of one's own, the shards of
# FineWeb-Edu, the training on all GPUs there are, bits per byte, CORE, a sample, and a report, out_dir/report.md; it ends with
# the table of all configs run so far. Each finished part is kept: after an interruption the same command continues.
# SOURCE=FOLDER takes all parquet, jsonl or txt files there in the place of the hub's. TINY=1 is the same at the size of a CPU,
# on the Python standard library's own source unless SOURCE says otherwise, without network, in data/tiny and out/tiny: under
# six minutes a config on two cores. CORE needs `pip install lm-eval`; without it the report says so.
set -euo pipefail
[ $# = 1 ] || { echo "error: name one config: bash runs/pretrain.sh config/NAME.py" >&2; exit 2; }
config=$1
REQUIREMENTS=requirements-data.txt
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export PYTHONUNBUFFERED=1
trap 'exit 130' INT
trap 'exit 143' TERM
core=(--lm_eval=core)
if [ -n "${TINY:-}" ]; then
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
    core+=(--limit=20)
    config=$(python -m runs.pretrain scale "$config" tiny)
    [ -n "${SOURCE:-}" ] || python -m runs.pretrain text data/tiny/text
    SOURCE=${SOURCE:-data/tiny/text}
fi
plan=$(python -m runs.pretrain plan "$config")
read -r data out vocab_size subset limit val_fraction batch max_batches gpus <<< "$plan"
tokenizer=$(dirname "$data")/tokenizer
launch=(python)
[ "$gpus" = 0 ] || launch=(torchrun --standalone --nproc_per_node="$gpus")
step() { echo; echo "$(date +%H:%M:%S) $*"; }

step tokenizer
python prepare_data.py tokenizer --vocab_size="$vocab_size" ${SOURCE:+"--source=$SOURCE"} --out="$tokenizer"
step shards
corpus=(--subset="$subset" --limit_tokens="$limit")
[ -z "${SOURCE:-}" ] || corpus=(--source="$SOURCE")
python prepare_data.py fineweb_edu "${corpus[@]}" --val_fraction="$val_fraction" --tokenizer="$tokenizer" --config="$config" \
    --out="$data"

step training
"${launch[@]}" train.py "$config" --init_from=auto

finished() { [ "$out/$1" -nt "$out/ckpt.pt" ]; }
measure=("${launch[@]}" eval.py --ckpt="$out" --batch_size="$batch")
step bits per byte
finished "eval-${data##*/}-val.json" || "${measure[@]}" --max_batches="$max_batches"
step CORE
if ! finished core.json; then
    if "${measure[@]}" "${core[@]}" 2>&1 | tee "$out/core.log"; then
        cp "$out/eval-lm_eval.json" "$out/core.json"
    fi
fi
step sample
if ! finished sample.txt; then
    python sample.py --ckpt="$out" --max_tokens=200 > "$out/sample.txt.part"
    mv "$out/sample.txt.part" "$out/sample.txt"
fi
cat "$out/sample.txt"

step report
python -m runs.pretrain report "$config"
