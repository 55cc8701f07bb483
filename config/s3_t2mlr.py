from s3_transformer import *

out_dir = 'out/s3_t2mlr'
recurrence = 't2mlr'
l_start = l_end = 1
schedule = 'jacobi'
d_forward, d_backward = 16, 4
