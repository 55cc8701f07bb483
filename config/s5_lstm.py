# State tracking with retrieval on S_5, as config/s5_transformer.py: an LSTM of the same width.
# One CPU core, about four minutes.
from s5_transformer import *

out_dir = 'out/s5_lstm'
architecture = 'lstm'
n_layer = 2
optimizer = 'adamw'  # it learns the state faster than with muon
