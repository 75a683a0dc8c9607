"""Sentences to reverse: sorted by length into batches of one length each, sequence first."""

import random

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

PAD, BOS = 0, 1


class Sentences(Dataset):
    def __init__(self, num_sentences, vocab, seed):
        chooser = random.Random(seed)
        self.rows = [
            [chooser.randrange(2, vocab) for _ in range(chooser.choice((9, 12, 15)))] for _ in range(num_sentences)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index][::-1]


class ByLength(Sampler):
    """Whole batches of one length, dealt out to ranks."""

    def __init__(self, data, batch_size, rank, world_size):
        by_length = {}
        for index, row in enumerate(data.rows):
            by_length.setdefault(len(row), []).append(index)
        size = batch_size * world_size
        whole = [same[n : n + size] for same in by_length.values() for n in range(0, len(same) - size + 1, size)]
        self.batches, self.rank, self.world_size, self.epoch = whole, rank, world_size, 0

    def __iter__(self):
        order = random.Random(self.epoch).sample(self.batches, len(self.batches))
        yield from (batch[self.rank :: self.world_size] for batch in order)

    def __len__(self):
        return len(self.batches)


def collate(pairs):
    sources, targets = (torch.tensor(side).T.contiguous() for side in zip(*pairs, strict=True))
    return sources, torch.cat([torch.full((1, targets.shape[1]), BOS), targets])


def make_loader(config, vocab, rank, world_size, seed):
    data = Sentences(config.num_sentences, vocab, seed)
    sampler = ByLength(data, config.batch_size, rank, world_size)
    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=collate, num_workers=config.num_workers, persistent_workers=True
    )
    return loader, sampler
