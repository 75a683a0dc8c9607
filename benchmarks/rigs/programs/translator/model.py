"""Encoder and decoder of gated recurrent units with attention."""

import torch
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self, dim, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder, self.decoder = nn.GRU(dim, dim), nn.GRU(dim, dim)
        self.mix, self.out = nn.Linear(2 * dim, dim), nn.Linear(dim, vocab)

    def forward(self, sources, targets):
        memory, state = self.encoder(self.embed(sources))
        decoded, _ = self.decoder(self.embed(targets), state)
        weights = torch.einsum("tbd,sbd->bts", decoded, memory).softmax(-1)
        context = torch.einsum("bts,sbd->tbd", weights, memory)
        return self.out(torch.tanh(self.mix(torch.cat([decoded, context], dim=-1))))
