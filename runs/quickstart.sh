#!/usr/bin/env bash
# The T2MLR paper's headline in miniature, from a fresh clone, in under six minutes on two cores after installation: three models
# of one width learn to track a permutation and to look values up; then a byte-level text model, and a sample of it.
# A second start re-uses what is there. Writes out/quickstart/results.json and out/quickstart/accuracy.png.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
out=out/quickstart
mkdir -p "$out"

python prepare_data.py s5 --group=3 --steps=1-8 --test_steps=1-16 --recur_on_prompt=True --out=data/s3
python prepare_data.py text --out=data/stdlib

echo; echo "Transformer and LSTM on one core (logs in $out/*.txt), T2MLR on the other:"
for name in transformer lstm; do
    python train.py config/s3_$name.py --init_from=auto --out_dir="$out/$name" > "$out/$name.txt" 2>&1
done &
baselines=$!
trap 'kill $baselines 2> /dev/null || true' EXIT
python train.py config/s3_t2mlr.py --init_from=auto --out_dir="$out/t2mlr"
wait $baselines || { echo "error: a baseline failed; see $out/transformer.txt and $out/lstm.txt." >&2; exit 1; }

python eval.py --ckpt="$out/t2mlr,$out/transformer,$out/lstm" --results="$out/results.json" --figure="$out/accuracy.png"
echo "wrote $out/results.json"

echo; echo "T2MLR on the bytes of the Python standard library, briefly:"
python train.py config/text_t2mlr.py --init_from=auto --out_dir="$out/text" --max_steps=400 --eval_interval=200 --eval_batches=4 \
    --eval_exact_batches=1
echo; echo "python sample.py"
python sample.py --prompt="def " --max_tokens=120
