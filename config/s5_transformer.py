# State tracking with retrieval on S_5, the T2MLR paper's synthetic task: a plain transformer.
# Data: python prepare_data.py s5 --group=5 --actions=generators --distractors=5 --steps=1-10 --test_steps=1-40 \
#           --recur_on_prompt=True
# One CPU core, about four minutes. bash runs/s5.sh runs it beside the others; what came out stands in docs/results.md.
data_dir = 'data/s5'
out_dir = 'out/s5_transformer'

n_layer, n_head, n_embd = 3, 4, 128
block_size = 128

max_steps = 1500
batch_size = 64
optimizer = 'muon'
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 100
weight_decay = 0.0
eval_interval = 250
eval_exact_batches = 4
threads = 1
dtype = 'float32'  # on a GPU too: so were the results measured
