"""What is known of token ids from a dataset's meta.json alone, without its tokenizer."""

import json


def ids_without_token(meta, vocab_size):
    """The ids below `vocab_size` that stand for nothing under the tokenizer of a meta.json, rising: those above its last id,
    and gaps in it. Special tokens, which have no bytes either, are known: those of a tokenizer.json, and the data's own."""
    if 'tokenizer' not in meta:
        return []
    known = {meta.get('document_token'), meta.get('stop_token'), meta.get('pad_token'), *range(len(meta.get('names', ())))}
    known |= {i for i, size in enumerate(meta.get('token_bytes', ())) if size}
    known |= {token['id'] for token in json.loads(meta.get('tokenizer_json', '{}')).get('added_tokens', ())}
    return [i for i in range(vocab_size) if i not in known]
