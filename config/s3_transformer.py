# State tracking with retrieval on S_3, the T2MLR paper's synthetic task in miniature: a plain transformer.
# Data: python prepare_data.py s5 --group=3 --steps=1-8 --test_steps=1-16 --recur_on_prompt=True
# One CPU core, about 40 seconds. Expected at 8 steps: state 52%, retrieval 34%; chance is 17% and 37%.
data_dir = 'data/s3'
out_dir = 'out/s3_transformer'

n_layer, n_head, n_embd = 3, 4, 64
block_size = 64  # room for test examples twice as long as those trained

max_steps = 750
batch_size = 32
optimizer = 'muon'  # the transformers learn faster with it than with AdamW
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 50
weight_decay = 0.0
eval_interval = 250
eval_exact_batches = 4
threads = 1
dtype = 'float32'  # on a GPU too: so were the results measured
