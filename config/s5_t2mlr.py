# State tracking with retrieval on S_5, as config/s5_transformer.py: a recurrence around the middle layer.
# One CPU core, about a quarter of an hour. Expected up to 10 steps: state and retrieval above 99%.
from s5_transformer import *

out_dir = 'out/s5_t2mlr'
recurrence = 't2mlr'
l_start = l_end = 1
schedule = 'jacobi'
d_forward, d_backward = 16, 4
