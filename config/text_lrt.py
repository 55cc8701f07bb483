# Bytes of the Python standard library, as config/text_transformer.py: LRT, shared projections, two interleaved passes.
# Two CPU cores, about nine minutes; a step has twice the plain transformer's FLOPs.
from text_transformer import *

out_dir = 'out/text_lrt'
recurrence = 'lrt'
source_layer = 3
schedule = 'interleaved'
n_subsets = 2
