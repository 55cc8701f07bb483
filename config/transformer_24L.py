# The baseline of the LRT paper's larger scale: 24 layers x 1536, 1.99 billion parameters. Published at
# 'compute 80': 0.699 bits per byte. 8 GPUs of 80 GB, time not measured. The rest is that of config/transformer_20L.py.
from transformer_20L import *

out_dir = 'out/transformer_24L'
n_layer, n_head, n_embd = 24, 12, 1536
max_steps = 38_000  # 20 billion tokens, ten per parameter
device_batch_size = 4
