# As config/lrt_24L.py with projections of their own for every layer: the paper's 2.1 billion parameters.
# Published at 'compute 80': 0.693 bits per byte against 0.699.
from lrt_24L import *

out_dir = 'out/lrt_layerwise_24L'
memory_projection = 'layerwise'
