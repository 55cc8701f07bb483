# T2MLR's retrofit at 135M, as config/retrofit_smollm2_135m_gsm8k.py, on variable assignment: the value at the end of a chain of
# one to four aliases among distractors. The memory is read on the prompt too, where the assignments stand.
# Data: the folder of the checkpoint, as there, and
#       python prepare_data.py variable_assignment --depth=1-4 --test_depth=1-5 --variables=10 --recur_on_prompt=True \
#           --tokenizer=data/SmolLM2-135M-Instruct/tokenizer.json --out=data/variables_smollm2
# One GPU of 24 GB, a few minutes (an estimate); runs/retrofit.sh runs a shorter one on two CPU cores. The paper reports a gain
# over the control on this task, without a number for this size; expect the gap to grow with the depth.
from retrofit_smollm2_135m_gsm8k import *

data_dir = 'data/variables_smollm2'
out_dir = 'out/retrofit_smollm2_135m_variables'
block_size = 96
max_steps = 1000
eval_interval = 250
