# LRT on 24 layers, as config/transformer_24L.py: shared projections, two interleaved passes.
# Published at 'compute 80': 0.695 bits per byte against 0.699. The source, layer 14, is as deep in proportion as 12 of 20.
from transformer_24L import *

out_dir = 'out/lrt_24L'
recurrence = 'lrt'
source_layer = 14
schedule = 'interleaved'
n_subsets = 2
device_batch_size = 2
