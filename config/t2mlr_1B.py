# T2MLR at 1B, as config/t2mlr_135M.py. The summary of the paper gives no shape; this is that of Llama 3.2 1B with the smaller
# vocabulary: the middle 3 of 16 layers. Published: matches or beats its baseline (--recurrence=none --schedule=parallel).
from t2mlr_135M import *

out_dir = 'out/t2mlr_1B'
n_layer, n_head, n_kv_head, n_embd, n_hidden = 16, 32, 8, 2048, 8192
l_start, l_end = 7, 9
learning_rate = 1e-3
device_batch_size = 4
