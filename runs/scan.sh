#!/usr/bin/env bash
# What scan passes and a drawn number of passes do, beside plain passes: state tracking on S_3 and S_5, and a small model of the
# bytes of the Python standard library; the same data, steps and batch in each group. PARTS (default: s3 text s5) and SEEDS
# (default: 1 2 3; texts have the first two) choose. About ten hours of one CPU core, JOBS (default 2) cells at a time. A finished
# cell is a file in results/scan_PART, and a second start continues with the others. Ends with the tables.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
parts=${PARTS:-s3 text s5} seeds=${SEEDS:-1 2 3}
common="--init_from=auto --threads=1"

run_part() { # PART MEASURED SEEDS FLAGS: runs `cells`, and each of `pairs` with the scan and without
    for pair in "${pairs[@]}"; do
        cells+=("${pair/ /-scan } --scan=True" "${pair/ /-plain }")
    done
    for seed in $3; do
        for cell in "${cells[@]}"; do echo "results/scan_$1/${cell/ /-$seed.json $2 } $4 $common --seed=$seed"; done
    done | run_cells
    python eval.py --study="results/scan_$1"
}

for part in $parts; do
    case $part in
    s3)
        python prepare_data.py s5 --group=3 --steps=1-8 --test_steps=1-16 --recur_on_prompt=True --out=data/s3
        pairs=() cells=("t2mlr-8-scan config/s3_t2mlr.py --d_forward=8 --scan=True")
        run_part s3 s3-test "$seeds" ""
        ;;
    text) # 66,000 parameters; 1,500 updates of 4,096 bytes
        python prepare_data.py text --out=data/stdlib
        t2mlr="config/text_t2mlr.py --l_start=1 --l_end=2 --d_backward=2"
        lrt="config/text_lrt.py --source_layer=2"
        cells=("plain config/text_transformer.py")
        pairs=(
            "t2mlr-1to4 $t2mlr --d_forward=4 --min_passes=1"
            "t2mlr-2 $t2mlr --d_forward=2"
            "lrt-interleaved2 $lrt"
            "lrt-refine1 $lrt --schedule=jacobi --d_forward=1 --d_backward=2"
            "lrt-refine1to3 $lrt --schedule=jacobi --d_forward=3 --d_backward=4 --min_passes=1"
            "t2mlr-1to8 $t2mlr --d_forward=8 --min_passes=1"
            "t2mlr-4 $t2mlr --d_forward=4 --d_backward=4"
        )
        export EVAL_FLAGS="--batch_size=32 --max_batches=40"
        run_part text stdlib-val "$(echo "$seeds" | cut -d ' ' -f 1-2)" \
            "--n_layer=4 --n_embd=32 --batch_size=32 --learning_rate=4e-3 --eval_interval=1500 --eval_batches=1 --eval_exact_batches=0"
        ;;
    s5) # 500 test examples of each length
        python prepare_data.py s5 --group=5 --actions=generators --distractors=5 --steps=1-10 --test_steps=1-40 --n_test=20000 \
            --recur_on_prompt=True --out=data/s5-20000
        cells=() t2mlr=config/s5_t2mlr.py lrt=config/s5_lrt.py
        pairs=(
            "t2mlr-4 $t2mlr --d_forward=4"
            "t2mlr-8 $t2mlr --d_forward=8"
            "t2mlr-16 $t2mlr"
            "lrt-interleaved2 $lrt"
            "lrt-interleaved4 $lrt --n_subsets=4"
            "lrt-refine1 $lrt --schedule=jacobi --d_forward=1 --d_backward=2"
            "lrt-refine3 $lrt --schedule=jacobi --d_forward=3 --d_backward=4"
        )
        export EVAL_FLAGS=
        run_part s5 s5-20000-test "$seeds" "--data_dir=data/s5-20000"
        ;;
    *) echo "error: PARTS=$part is not known; choose from s3, text, s5." >&2; exit 2 ;;
    esac
done
