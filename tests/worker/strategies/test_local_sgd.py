"""Parameters of local SGD lie in one piece of memory, as they are."""

import torch
from torch import nn

from scalelab.worker.strategies.local_sgd import PeriodicAverage, join_storage


def test_parameters_keep_values_strides_and_identity() -> None:
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    parameters = [*convolution.parameters(), nn.Parameter(torch.arange(12.0).view(3, 4)[:, 1:3])]
    before = [(parameter.detach().clone(), parameter.shape) for parameter in parameters]
    piece = join_storage(parameters)
    assert piece.shape == (4 * 3 * 2 * 2 + 4 + 6,)
    for parameter, (values, shape) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.shape == shape
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    piece.mul_(2)
    assert all(torch.equal(parameter, 2 * values) for parameter, (values, _) in zip(parameters, before, strict=True))


def test_every_data_type_has_a_piece() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    average = PeriodicAverage(parameters, period=2, warmup=1)
    assert [(len(piece), piece.dtype) for piece in average._pieces] == [(4, torch.float32), (2, torch.bfloat16)]
    due = []
    for average.num_steps in range(6):
        due.append(average.is_next)
    assert due == [False, True, False, True, False, True]
