# Answers that need several hops, asked at once, from scratch: a plain transformer, the control of reasoning_t2mlr.py.
# Data: python prepare_data.py variable_assignment --test_depth=1-7 --recur_on_prompt=True
#       python prepare_data.py pathfinding --recur_on_prompt=True, for --data_dir=data/pathfinding
# One CPU core: 9 minutes on variables, 24 on paths, other work beside. bash runs/reasoning.sh runs both models on both.
data_dir = 'data/variable_assignment'
out_dir = 'out/reasoning_transformer'

n_layer, n_head, n_embd = 3, 4, 128
block_size = 256

max_steps = 2000
batch_size = 32
optimizer = 'muon'
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 100
weight_decay = 0.0
eval_interval = 500
eval_exact_batches = 1
threads = 1
dtype = 'float32'  # on a GPU too: so were the results measured
