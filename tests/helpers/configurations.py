"""Small configurations of transformers, as their ``config.json`` has them."""

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 99,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
