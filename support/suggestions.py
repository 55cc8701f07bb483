"""What a person may have meant by a word that is not known."""

import difflib

OTHER_NAMES = {  # what other trainers call our keys
    'learning_rate': 'lr max_lr peak_lr',
    'batch_size': 'bs train_batch_size',
    'device_batch_size': 'accumulation grad_accum gradient_accumulation_steps micro_batch_size',
    'max_steps': 'steps iters max_iters num_iterations epochs num_epochs updates',
    'warmup_steps': 'warmup warmup_iters',
    'weight_decay': 'wd',
    'grad_clip': 'clip clip_grad max_grad_norm',
    'n_layer': 'layers depth num_layers num_hidden_layers',
    'n_head': 'heads num_heads num_attention_heads',
    'n_embd': 'width dim d_model hidden_size',
    'n_hidden': 'd_ff intermediate_size',
    'block_size': 'context context_length seq_len sequence_length max_length',
    'data_dir': 'data dataset',
    'source': 'data dataset input path',
    'out_dir': 'output output_dir save_dir',
    'out': 'output output_dir data_dir',
    'init_from': 'resume checkpoint pretrained',
    'ckpt': 'model checkpoint out_dir',
    'dtype': 'precision amp fp16 bf16',
    'activation_checkpointing': 'gradient_checkpointing',
    'device': 'gpu cuda',
    'max_tokens': 'length max_new_tokens',
    'num_samples': 'n',
}


def nearest(word, words):
    """The end of a sentence that helps: the most similar of `words`, or all of them if none is similar."""
    close = difflib.get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.5)
    return f'did you mean {close[0]!r}?' if close else 'choose from: ' + ', '.join(str(w) for w in words) + '.'


def suggest_key(name, declared):
    """The end of a sentence that helps: the declared key whose name, or another name for it, resembles `name`."""
    words = {word: known for known in declared for word in OTHER_NAMES.get(known, '').split()} | {k: k for k in declared}
    close = difflib.get_close_matches(name.lower(), words, n=1)
    return f'did you mean {words[close[0]]!r}?' if close else '--help lists the keys.'
