#!/usr/bin/env bash
# Every variant of both papers on the bytes of the Python standard library, from a fresh clone, on two CPU cores: the same data
# in the same order and the same number of steps for every cell, two seeds. STEPS (default 600) sets the steps. A finished
# cell is a file in results/ablation, and a second start continues with the others. Ends with the table and results/ablation.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
steps=${STEPS:-600}
flags="--threads=1 --eval_interval=$steps --eval_batches=1 --eval_exact_batches=0 --init_from=auto"
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

export EVAL_FLAGS=--max_batches=16
for seed in 1 2; do
    for cell in "${cells[@]}"; do
        [[ $cell == *--max_steps=* ]] || cell+=" --max_steps=$steps"
        echo "results/ablation/${cell/ /-$seed.json stdlib-val } $flags --seed=$seed"
    done
done | run_cells

python eval.py --study=results/ablation --figure=results/ablation.png
