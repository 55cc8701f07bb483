# As config/lrt_20L.py with projections of their own for every layer. Published: CORE 0.277 against 0.271.
from lrt_20L import *

out_dir = 'out/lrt_layerwise_20L'
memory_projection = 'layerwise'
