#!/usr/bin/env bash
# State tracking with retrieval on S_5, the T2MLR paper's synthetic task: actions are adjacent transpositions and the 5-cycle, the
# dictionary holds five further keys; trained on up to 10 actions, tested on up to 40; the same data, steps and batch for all.
# Two CPU cores, about an hour for one seed (SEED, default 1337). A finished cell is a file in results/s5, and a second start continues
# with the others. Ends with the table and results/s5.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
out=out/s5
export out seed=${SEED:-1337} steps=${STEPS:-1500}
mkdir -p "$out" results/s5
python prepare_data.py s5 --group=5 --actions=generators --distractors=5 --steps=1-10 --test_steps=1-40 --recur_on_prompt=True \
    --out=data/s5

runs=( # the longest first
    "t2mlr-full config/s5_t2mlr.py --l_start=0 --l_end=2"
    "t2mlr-middle config/s5_t2mlr.py"
    "lrt-refine3 config/s5_lrt.py --schedule=jacobi --d_forward=3 --d_backward=4"
    "lrt-interleaved2 config/s5_lrt.py"
    "loop config/s5_transformer.py --n_loop=4 --l_start=1 --l_end=1"
    "transformer config/s5_transformer.py"
    "lstm config/s5_lstm.py"
)
run_cell() { # "NAME CONFIG FLAGS..."
    read -r -a words <<< "$1"
    local name=${words[0]}-$seed
    [ -f "results/s5/$name.json" ] && return
    echo "$(date +%H:%M:%S) $name"
    python train.py "${words[1]}" --init_from=auto --seed="$seed" --max_steps="$steps" --out_dir="$out/$name" "${words[@]:2}" \
        > "$out/$name.txt" 2>&1 && python eval.py --threads=1 --ckpt="$out/$name" >> "$out/$name.txt" 2>&1 &&
        cp "$out/$name/eval-s5-test.json" "results/s5/$name.json" || { echo "failed: see $out/$name.txt"; return 1; }
}
export -f run_cell
printf '%s\0' "${runs[@]}" | xargs -0 -P 2 -I{} bash -c 'run_cell "$1"' _ {}

python eval.py --study=results/s5 --figure=results/s5.png
