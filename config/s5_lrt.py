# State tracking with retrieval on S_5, as config/s5_transformer.py: LRT with shared projections, two interleaved passes.
# One CPU core, about ten minutes.
from s5_transformer import *

out_dir = 'out/s5_lrt'
recurrence = 'lrt'
source_layer = 1
schedule = 'interleaved'
n_subsets = 2
