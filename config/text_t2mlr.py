# Bytes of the Python standard library, as config/text_transformer.py: a recurrence around the two middle layers.
# Two CPU cores, about nine minutes; a step has 2.2 times the plain transformer's FLOPs.
from text_transformer import *

out_dir = 'out/text_t2mlr'
recurrence = 't2mlr'
l_start, l_end = 2, 3
schedule = 'jacobi'
d_forward, d_backward = 4, 4
