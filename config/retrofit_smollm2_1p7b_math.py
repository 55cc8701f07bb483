# T2MLR's retrofit: SmolLM2-1.7B-Instruct with a recurrence around layers 10 to 14 of 24 (the paper's middle 20%), fine-tuned on
# mathematics. Published: GSM8K 35.8% without the recurrence and 39.9% with it, MATH500 12.8% and 18.0%; its data are not named.
# Data: hf download HuggingFaceTB/SmolLM2-1.7B-Instruct --local-dir data/SmolLM2-1.7B-Instruct
#       python prepare_data.py gsm8k_aug --longest=256 --drop_longer=True \
#           --tokenizer=data/SmolLM2-1.7B-Instruct/tokenizer.json --out=data/gsm8k_aug_smollm2
# and, to evaluate, gsm8k and math500 with the same --tokenizer. One GPU of 80 GB, about three hours (an estimate from the
# FLOPs). Expected: a gain over the control on GSM8K; on MATH500 only with competition problems among the data.
init_from = 'hf:data/SmolLM2-1.7B-Instruct'
data_dir = 'data/gsm8k_aug_smollm2'
out_dir = 'out/retrofit_smollm2_1p7b_math'

family = 'llama'  # the shape comes from the checkpoint; stated for --dry_run=True without it
vocab_size = 49152
n_layer, n_head, n_kv_head, n_embd, n_hidden = 24, 32, 32, 2048, 8192
rope_base = 130000.0
block_size = 512

recurrence = 't2mlr'
l_start, l_end = 10, 14
schedule = 'jacobi'
d_forward, d_backward = 16, 5  # the authors' batch_backward_approximate_depth=4: 4 + 1 passes carry gradient
recurrence_lr_scale = 100.0  # the gates start closed and must open within one epoch

max_steps = 6000  # one epoch of 386,000 problems
batch_size = 64
device_batch_size = 32
learning_rate = 1e-5
warmup_steps = 200
weight_decay = 0.0
activation_checkpointing = True
compile = True
eval_interval = 500
