# Answers that need several hops, asked at once, as config/reasoning_transformer.py: a recurrence around the middle layer.
# One CPU core: 20 minutes on variables, 50 to 70 on paths, with other work beside.
from reasoning_transformer import *

out_dir = 'out/reasoning_t2mlr'
recurrence = 't2mlr'
l_start = l_end = 1
schedule = 'jacobi'
d_forward, d_backward = 16, 4
