# The baseline of the LRT paper's smaller scale: 20 layers x 1280, value embeddings on every layer, FineWeb-Edu, ten tokens per
# parameter. Published: 0.767 bits per byte, CORE 0.271.
# torchrun --nproc_per_node=8 train.py config/transformer_20L.py on 8 GPUs of 80 GB. Time: not measured; --dry_run=True prints
# the FLOPs. data_dir must hold FineWeb-Edu tokenised with a vocabulary of at most 32768.
data_dir = 'data/fineweb_edu'
out_dir = 'out/transformer_20L'

vocab_size = 32768
block_size = 2048
n_layer, n_head, n_embd = 20, 10, 1280
value_embeddings = 'all'

max_steps = 25_000  # 13 billion tokens at half a million per step
batch_size = 256
device_batch_size = 8
optimizer = 'muon'
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 250
weight_decay = 0.1
compile = True
eval_interval = 1000
eval_batches = 20
