# As config/t2mlr_135M.py with the recurrence around all 30 layers. Published: behind the middle block.
from t2mlr_135M import *

out_dir = 'out/t2mlr_full_135M'
l_start, l_end = 0, 29
device_batch_size = 4
