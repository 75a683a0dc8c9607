"""An image set holds what it says it holds."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.data.images import ImageSet

IMAGES, LABELS = np.zeros((2, 3, 32, 32), np.uint8), np.zeros(2, np.int64)
THREE = (0.5, 0.5, 0.5)


def test_its_length_is_the_number_of_samples() -> None:
    assert len(ImageSet(IMAGES, LABELS, THREE, THREE)) == 2


@pytest.mark.parametrize(
    "fields",
    [
        (IMAGES.astype(np.float32), LABELS, THREE, THREE),
        (IMAGES[:1], LABELS, THREE, THREE),
        (IMAGES[..., :8], LABELS, THREE, THREE),
        (IMAGES, LABELS.astype(np.int32), THREE, THREE),
        (IMAGES, LABELS, (0.5,), THREE),
    ],
)
def test_other_types_and_shapes_are_refused(fields: tuple[np.ndarray, np.ndarray, tuple, tuple]) -> None:
    with pytest.raises(ValueError, match=r"not|need"):
        ImageSet(*fields)
