# The baseline of T2MLR's pretraining: the shape of SmolLM2-135M (134,515,008 parameters) from scratch on FineWeb-Edu.
# torchrun --nproc_per_node=8 train.py config/transformer_135M.py on 8 GPUs of 80 GB, or with --device_batch_size=8 of 24 GB.
# Time: not measured.
# data_dir must hold FineWeb-Edu tokenised with a vocabulary of at most 49152. T2MLR reports zero-shot scores only.
data_dir = 'data/fineweb_edu'
out_dir = 'out/transformer_135M'

family = 'llama'
vocab_size = 49152
block_size = 2048
n_layer, n_head, n_kv_head, n_embd, n_hidden = 30, 9, 3, 576, 1536
rope_base = 100000.0

max_steps = 20_000  # 10 billion tokens at half a million per step, the 10BT sample once
batch_size = 256
device_batch_size = 16
learning_rate = 3e-3
lr_schedule = 'linear'
final_lr_fraction = 0.0
warmup_steps = 500
weight_decay = 0.1
compile = True
eval_interval = 1000
eval_batches = 20
