# The control of config/retrofit_smollm2_135m_variables.py: the same fine-tuning without a recurrence, on the same data.
# One GPU of 24 GB, a few minutes (an estimate).
from retrofit_smollm2_135m_variables import *

out_dir = 'out/retrofit_smollm2_135m_variables_control'
recurrence = 'none'
schedule = 'parallel'
