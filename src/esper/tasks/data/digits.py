"""The embedded digits: 1,797 images of 8 by 8 pixels that come with scikit-learn.

They need no file and no network, so they carry the tests and the first demonstration.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.data.source import Source

NUM_CLASSES = 10
GREY_LEVELS = 16.0
# Of all pixels divided by 16; fixed, so that the split does not change the input.
MEAN, STD = 0.3053, 0.3760


def read_digits() -> Source:
    """Return the digits as images [N, 1, 8, 8]; they have no official test split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; "
            "install it with: pip install scikit-learn"
        ) from None
    images, labels = load_digits(return_X_y=True)
    return Source(
        name="digits",
        origin="scikit-learn's digits",
        x=images.reshape(-1, 1, 8, 8).astype(np.uint8),
        y=labels.astype(np.int64),
        num_classes=NUM_CLASSES,
        scale=GREY_LEVELS,
        mean=(MEAN,),
        std=(STD,),
    )
