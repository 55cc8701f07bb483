#!/usr/bin/env bash
# State tracking with retrieval on S_5, the T2MLR paper's synthetic task: actions are adjacent transpositions and the 5-cycle, the
# dictionary holds five further keys; trained on up to 10 actions, tested on up to 40; the same data, steps and batch for all.
# Two CPU cores, about an hour for one seed (SEED, default 1337). A finished cell is a file in results/s5, and a second start continues
# with the others. Ends with the table and results/s5.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
flags="--init_from=auto --seed=${SEED:-1337} --max_steps=${STEPS:-1500}"
python prepare_data.py s5 --group=5 --actions=generators --distractors=5 --steps=1-10 --test_steps=1-40 --recur_on_prompt=True \
    --out=data/s5

cells=( # the longest first
    "t2mlr-full config/s5_t2mlr.py --l_start=0 --l_end=2"
    "t2mlr-middle config/s5_t2mlr.py"
    "lrt-refine3 config/s5_lrt.py --schedule=jacobi --d_forward=3 --d_backward=4"
    "lrt-interleaved2 config/s5_lrt.py"
    "loop config/s5_transformer.py --n_loop=4 --l_start=1 --l_end=1"
    "transformer config/s5_transformer.py"
    "lstm config/s5_lstm.py"
)
for cell in "${cells[@]}"; do echo "results/s5/${cell/ /-${SEED:-1337}.json s5-test } $flags"; done | run_cells

python eval.py --study=results/s5 --figure=results/s5.png
