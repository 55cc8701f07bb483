# Bytes of the Python standard library: a plain transformer of CPU size, the baseline of text_t2mlr.py and text_lrt.py.
# Data: python prepare_data.py text
# Two CPU cores, about four minutes.
data_dir = 'data/stdlib'
out_dir = 'out/text_transformer'

n_layer, n_head, n_embd = 6, 4, 128
block_size = 128

max_steps = 1500
batch_size = 16
optimizer = 'muon'
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_steps = 50
eval_interval = 250
eval_batches = 20
eval_exact_batches = 4
dtype = 'float32'  # on a GPU too: so were the results measured
