# State tracking with retrieval on S_3, as config/s3_transformer.py: LRT with shared projections, two interleaved passes.
# One CPU core, about two minutes (an estimate). Two passes carry a memory over two positions; a state takes more.
from s3_transformer import *

out_dir = 'out/s3_lrt'
recurrence = 'lrt'
source_layer = 1
schedule = 'interleaved'
n_subsets = 2
