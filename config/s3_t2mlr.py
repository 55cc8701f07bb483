# State tracking with retrieval on S_3, as config/s3_transformer.py: the same transformer, a recurrence around its middle layer.
# One CPU core, about a minute and a half. Expected at 8 steps: state and retrieval above 99%.
from s3_transformer import *

out_dir = 'out/s3_t2mlr'
recurrence = 't2mlr'
l_start = l_end = 1
schedule = 'jacobi'
d_forward, d_backward = 8, 4
scan = True
