"""A model from another library: Hugging Face's GPT-2, made from its configuration, with nothing to download.

pip install transformers
scalelab run strong-scaling --workload examples/hf_gpt2.py:build --layers 4 --width 256 --ranks 1 2
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build(batch_size, rank, num_ranks, seed, layers=2, heads=4, width=64, context=32, vocabulary=512):
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (4, num_ranks, batch_size, context), generator=generator)

    def loss(model, batch):
        return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss

    return {
        "model": GPT2LMHeadModel(config),
        "batches": [{"tokens": step[rank]} for step in tokens],
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    }
