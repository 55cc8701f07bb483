# A looped transformer, as config/transformer_20L.py: the whole stack twice in depth, in training and in decoding.
# Published: 0.753 bits per byte with two loops, 0.749 with three (--n_loop=3), against 0.767 without.
from transformer_20L import *

out_dir = 'out/loop_20L'
l_start, l_end = 0, 19
n_loop = 2
device_batch_size = 4
