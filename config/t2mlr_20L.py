# T2MLR on the LRT paper's backbone, as config/transformer_20L.py: a middle span of 4 layers (20% of the depth).
# Neither paper trained this cell; T2MLR reports that a middle block of about 20% matches or beats full-layer recurrence.
# About 2.6 times the FLOPs of the baseline; 8 GPUs of 80 GB, time not measured.
# The authors' settings are 16 passes and batch_backward_approximate_depth=4, which lets 4 + 1 passes carry gradient.
from transformer_20L import *

out_dir = 'out/t2mlr_20L'
recurrence = 't2mlr'
l_start, l_end = 8, 11
schedule = 'jacobi'
d_forward, d_backward = 16, 5
