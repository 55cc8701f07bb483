# T2MLR at 135M, as config/transformer_135M.py: layers 13 to 18 of 30, the paper's best middle block (20% of the layers).
# Published: matches or beats the baseline on zero-shot tasks, and the full-layer recurrence too.
# The authors' settings are 16 passes and batch_backward_approximate_depth=4, which lets 4 + 1 passes carry gradient.
from transformer_135M import *

out_dir = 'out/t2mlr_135M'
recurrence = 't2mlr'
l_start, l_end = 13, 18
schedule = 'jacobi'
d_forward, d_backward = 16, 5
