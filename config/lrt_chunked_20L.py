# As config/lrt_20L.py trained chunk by chunk, left to right, the paper's baseline for its interleaved passes: only the first
# position of a chunk reads memory. 16 chunks of 128.
from lrt_20L import *

out_dir = 'out/lrt_chunked_20L'
schedule = 'chunked'
chunk_size = 128
