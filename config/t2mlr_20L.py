# T2MLR on the 20-layer, 1.3B-parameter backbone of the LRT paper, FineWeb-Edu, a middle span of 4 layers (20% of the depth).
# Neither paper trained this cell; T2MLR reports that a middle block of about 20% matches or beats full-layer recurrence, and
# the plain backbone reaches 0.767 bits per byte at 10 tokens per parameter.
# torchrun --nproc_per_node=8 train.py config/t2mlr_20L.py on 8 GPUs of 80 GB. Time: not measured yet; `--dry_run=True`
# prints the operations. data_dir must hold a tokenised corpus with a vocabulary of at most 32768.
data_dir = 'data/fineweb_edu'
out_dir = 'out/t2mlr_20L'

vocab_size = 32768
block_size = 2048
n_layer, n_head, n_embd = 20, 10, 1280
value_embeddings = 'all'

recurrence = 't2mlr'
l_start, l_end = 8, 11
schedule = 'jacobi'
d_forward, d_backward = 16, 4

max_steps = 25_000  # 13 billion tokens at half a million a step, ten tokens per parameter
batch_size = 256
accumulation = 8
optimizer = 'muon'
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 250
weight_decay = 0.1
compile = True
eval_interval = 1000
eval_batches = 20
