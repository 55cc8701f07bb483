# T2MLR at 361M, as config/t2mlr_135M.py in the shape of SmolLM2-360M: the middle 6 of 32 layers.
# Published: matches or beats its baseline (--recurrence=none --schedule=parallel) on zero-shot tasks.
from t2mlr_135M import *

out_dir = 'out/t2mlr_361M'
n_layer, n_head, n_kv_head, n_embd, n_hidden = 32, 15, 5, 960, 2560
l_start, l_end = 14, 19
learning_rate = 2e-3
device_batch_size = 8
