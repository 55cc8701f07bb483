#!/usr/bin/env bash
# Variable assignment and path finding from scratch, T2MLR against the same transformer without it: the same data, steps and
# batch; exact match by depth, beyond the trained depths too. The graphs are of ProsQA's kind: layered, with dead ends.
# Two CPU cores, under an hour for one seed (SEED, default 1337). A finished cell is a file in results/reasoning_*, and a second start
# continues with the others. Ends with a table and a figure for each task.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
seed=${SEED:-1337}
python prepare_data.py variable_assignment --depth=0-3 --test_depth=0-5 --variables=8 --values=0-9 --recur_on_prompt=True \
    --out=data/reasoning_variables
python prepare_data.py pathfinding --depth=2-4 --test_depth=2-6 --recur_on_prompt=True --out=data/reasoning_paths

for model in t2mlr transformer; do
    for task in reasoning_variables reasoning_paths; do
        echo "results/$task/$model-$seed.json $task-test config/reasoning_$model.py --data_dir=data/$task --init_from=auto" \
            "--seed=$seed --max_steps=${STEPS:-2000}"
    done
done | run_cells

python - <<'END'
import json, re
from collections import defaultdict

guesses = defaultdict(list)
with open('data/reasoning_variables/test.jsonl') as f:
    for example in map(json.loads, f):
        numbers = re.findall(r'\d+', example['prompt'])
        guesses[example['depth']].append(numbers.count(example['answer']) / len(numbers))
print('variables, guessing one of the numbers in the prompt:', end=' ')
print(', '.join(f'depth {depth} {sum(right) / len(right):.1%}' for depth, right in sorted(guesses.items())))
END
for task in variables paths; do
    python eval.py --study="results/reasoning_$task" --figure="results/reasoning_$task.png"
done
