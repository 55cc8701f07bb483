# LRT on 20 layers, as config/transformer_20L.py: shared projections, layer 12 as the source, two interleaved passes.
# Published: 0.752 bits per byte against 0.767, CORE 0.274 against 0.271. About 2.1 times the FLOPs of the baseline.
from transformer_20L import *

out_dir = 'out/lrt_20L'
recurrence = 'lrt'
source_layer = 12
schedule = 'interleaved'
n_subsets = 2
device_batch_size = 4
