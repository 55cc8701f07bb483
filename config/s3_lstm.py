# State tracking with retrieval on S_3, as config/s3_transformer.py: an LSTM of the same width.
# One CPU core, about 30 seconds. Expected at 8 steps: state near 100%, retrieval 20%.
from s3_transformer import *

out_dir = 'out/s3_lstm'
architecture = 'lstm'
n_layer = 2
optimizer = 'adamw'  # it learns the state faster than with muon
