"""A workload of your own: `build` returns model, batches and loss. Try it:

scalelab run weak-scaling --workload examples/my_model.py:build --hidden 512 --ranks 1 2
"""

import torch
from torch import nn


def build(batch_size, seed=0, hidden=256):
    """scalelab fills in `batch_size` and `seed`; `hidden` becomes the flag --hidden."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(10 * batch_size, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (10 * batch_size,), generator=generator)
    dataset = torch.utils.data.TensorDataset(images, labels)
    batches = torch.utils.data.DataLoader(dataset, batch_size=batch_size)
    return model, batches, nn.CrossEntropyLoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
