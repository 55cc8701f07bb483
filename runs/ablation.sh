#!/usr/bin/env bash
# Every variant of both papers on the bytes of the Python standard library, from a fresh clone, on two CPU cores: the same data
# in the same order and the same number of steps for every cell, two seeds. STEPS (default 600) sets the steps. A finished
# cell is a file in results/ablation, and a second start continues with the others. Ends with the table and results/ablation.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
steps=${STEPS:-600}
out=out/ablation
mkdir -p "$out" results/ablation
python prepare_data.py text --out=data/stdlib

lrt="config/text_lrt.py"
multi="--schedule=jacobi --d_forward"
cells=(
    "plain config/text_transformer.py"
    "plain-matched config/text_transformer.py --max_steps=$((steps * 2))"  # the FLOPs of two interleaved passes
    "loop config/text_transformer.py --n_loop=2 --l_start=0 --l_end=5"
    "lrt-shared-interleaved2 $lrt"
    "lrt-shared-refine1 $lrt $multi=1 --d_backward=2"
    "lrt-shared-refine3 $lrt $multi=3 --d_backward=4"
    "lrt-shared-chunked $lrt --schedule=chunked --chunk_size=16"
    "lrt-layerwise-interleaved2 $lrt --memory_projection=layerwise"
    "lrt-layerwise-refine1 $lrt --memory_projection=layerwise $multi=1 --d_backward=2"
    "lrt-layerwise-refine3 $lrt --memory_projection=layerwise $multi=3 --d_backward=4"
    "lrt-layerwise-chunked $lrt --memory_projection=layerwise --schedule=chunked --chunk_size=16"
    "lrt-source-early $lrt --source_layer=1"
    "lrt-source-final $lrt --source_layer=-1"
    "lrt-kv-only $lrt --residual_injection=False"
    "lrt-residual-only $lrt --memory_projection=none"
    "t2mlr-middle config/text_t2mlr.py"
    "t2mlr-full config/text_t2mlr.py --l_start=0 --l_end=5"
)

run_cell() { # "NAME CONFIG FLAGS..." SEED
    read -r -a words <<< "$1"
    local name=${words[0]}-$2
    [ -f "results/ablation/$name.json" ] && return
    echo "$(date +%H:%M:%S) $name"
    [[ $1 == *--max_steps=* ]] || words+=("--max_steps=$steps")
    python train.py "${words[1]}" --threads=1 --eval_interval="$steps" --eval_batches=1 --eval_exact_batches=0 \
        --init_from=auto --seed="$2" --out_dir="$out/$name" "${words[@]:2}" > "$out/$name.txt" 2>&1 &&
        python eval.py --threads=1 --ckpt="$out/$name" --max_batches=16 >> "$out/$name.txt" 2>&1 &&
        cp "$out/$name/eval-stdlib-val.json" "results/ablation/$name.json" || { echo "failed: see $out/$name.txt"; return 1; }
}
export -f run_cell
export steps out
for seed in 1 2; do printf '%s\n' "${cells[@]}" | sed "s/\$/\t$seed/"; done |
    tr '\n' '\0' | xargs -0 -P 2 -I{} bash -c 'IFS=$'"'\t'"' read -r cell seed <<< "$1"; run_cell "$cell" "$seed"' _ {}

python eval.py --study=results/ablation --figure=results/ablation.png
