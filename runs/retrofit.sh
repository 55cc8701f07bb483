#!/usr/bin/env bash
# T2MLR put into SmolLM2-135M-Instruct and fine-tuned, against the same fine-tuning without it, from a fresh clone: variable
# assignment (exact match by depth on held-out problems), then GSM8K, a smoke test of 100 steps scored on 100 problems. At most
# 90 minutes on two free CPU cores: T2MLR on one, the control on the other. A finished part is a file in results/retrofit, and a
# second start continues with the others. SOURCE (a folder with train.jsonl and test.jsonl) takes GSM8K from there, not from the
# hub; VARIABLES_STEPS, GSM8K_STEPS and PROBLEMS make it smaller. Ends with the tables. out/retrofit takes 7 GB.
set -euo pipefail
REQUIREMENTS=requirements-retrofit.txt
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=1
model=data/SmolLM2-135M-Instruct results=results/retrofit problems=${PROBLEMS:-100}

python -m runs.retrofit model "$model"
tokens="--tokenizer=$model/tokenizer.json"
python prepare_data.py variable_assignment --depth=1-3 --test_depth=1-5 --variables=6 --recur_on_prompt=True --n_train=20000 \
    --n_val=200 --n_test=500 "$tokens" --out=data/variables_smollm2
python prepare_data.py gsm8k ${SOURCE:+"--source=$SOURCE"} --longest=192 --drop_longer=True "$tokens" --out=data/gsm8k_smollm2

part() { # TASK t2mlr|control STEPS BATCH BLOCK PROBLEMS
    local config=config/retrofit_smollm2_135m_$1
    [ "$2" = t2mlr ] || config+=_control
    EVAL_FLAGS="--batch_size=$6 --max_batches=1" run_cell "$results/$1-$2.json" "$1_smollm2-test" "$config.py" --threads=1 \
        --block_size="$5" --max_steps="$3" --warmup_steps=$(($3 < 20 ? $3 : 20)) --batch_size="$4" --eval_interval=50 \
        --eval_batches=1 --eval_exact_batches=0
}
side() { # t2mlr|control
    part variables "$1" "${VARIABLES_STEPS:-200}" 8 96 "$((problems * 5))" &&
        part gsm8k "$1" "${GSM8K_STEPS:-100}" 4 192 "$problems"
}
side control &
control=$!
trap 'kill $control 2> /dev/null || true' EXIT
side t2mlr
wait $control
trap - EXIT

if [ ! -f "$results/cost.json" ]; then
    echo "$(date +%H:%M:%S) cost of a step"
    cost=$(python -m runs.retrofit cost --threads=1 --batch_size=4 --block_size=192)
    echo "$cost" > "$results/cost.json"
fi
python -m runs.retrofit table "$results"
