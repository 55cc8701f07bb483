# The control of config/retrofit_smollm2_135m_gsm8k.py: the same fine-tuning without a recurrence, on the same data.
# One GPU of 24 GB, about ten minutes (an estimate from the FLOPs). Nothing is published at this size.
from retrofit_smollm2_135m_gsm8k import *

out_dir = 'out/retrofit_smollm2_135m_gsm8k_control'
recurrence = 'none'
schedule = 'parallel'
