#!/usr/bin/env bash
# State tracking with retrieval on S_5, the T2MLR paper's synthetic task: actions are adjacent transpositions and the 5-cycle, the
# dictionary holds five further keys; trained on up to 10 actions, tested on up to 40; the same data, updates and batch for all.
# Two CPU cores, about an hour for one seed (SEED, default 1337). A finished run is a folder in out/s5 that a second
# start goes on from. Ends with the table, results/s5.json and results/s5.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
out=out/s5
export out seed=${SEED:-1337} steps=${STEPS:-1500}
mkdir -p "$out"
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
train() { # "NAME CONFIG FLAGS..."
    read -r -a words <<< "$1"
    echo "$(date +%H:%M:%S) ${words[0]}"
    python train.py "${words[1]}" --init_from=auto --seed="$seed" --max_steps="$steps" --out_dir="$out/${words[0]}" \
        "${words[@]:2}" > "$out/${words[0]}.txt" 2>&1 || { echo "failed: see $out/${words[0]}.txt"; return 1; }
}
export -f train
printf '%s\0' "${runs[@]}" | xargs -0 -P 2 -I{} bash -c 'train "$1"' _ {}

names=(transformer loop lstm lrt-interleaved2 lrt-refine3 t2mlr-middle t2mlr-full)
python eval.py --ckpt="$(printf "$out/%s," "${names[@]}" | sed 's/,$//')" --results=results/s5.json --figure=results/s5.png
