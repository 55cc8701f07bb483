# The control of config/retrofit_smollm2_1p7b_math.py: the same fine-tuning without a recurrence, on the same data.
# One GPU of 80 GB, about an hour and a half (an estimate from the FLOPs). Published: GSM8K 35.8%, MATH500 12.8%.
from retrofit_smollm2_1p7b_math import *

out_dir = 'out/retrofit_smollm2_1p7b_math_control'
recurrence = 'none'
schedule = 'parallel'
