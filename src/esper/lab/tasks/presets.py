"""The tasks on images that ship with Esper, each a small class with its settings.

The CIFAR hosts are those of the design documents, with GroupNorm instead of BatchNorm.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from esper.kasmina.hosts import CnnConfig, MlpConfig, ResidualConfig, doubling
from esper.lab.tasks.data import arrays as idx
from esper.lab.tasks.data import cifar, open_data
from esper.lab.tasks.data.arrays import read_npz
from esper.lab.tasks.data.source import Array, DataSet, Found, Layout, Source, existing
from esper.lab.tasks.member import SCHEDULE, SEED_WARM_UP, WARM_UP
from esper.lab.tasks.task import DataPath, Task, TaskConfig, register_task
from esper.leyline.errors import DataError
from esper.leyline.slots import slot_id

# ---- CIFAR-10 at 16x16 and Fashion-MNIST at 14x14: a quarter of the pixels, a quarter of the work


CIFAR16 = Layout("one file of CIFAR-10 at 16x16", (("cifar16.npz",),))
CIFAR16_SHAPE = (3, 16, 16)
CIFAR16_TRAIN = 30_000
"""Number of training images, the first ones in the official order."""
# Statistics of these images, divided by 255.
CIFAR16_MEAN = (0.4916, 0.4820, 0.4461)
CIFAR16_STD = (0.2386, 0.2352, 0.2538)

FASHION14 = Layout("one file of Fashion-MNIST at 14x14", (("fashion14.npz",),))
FASHION14_SHAPE = (1, 14, 14)
# Statistics of the 60,000 training images, divided by 255.
FASHION14_MEAN, FASHION14_STD = (0.2860,), (0.3301,)


def read_cifar16(found: Found) -> Source:
    """Return the first 30,000 training images and all test images of CIFAR-10, [N, 3, 16, 16]."""
    if found.layout is CIFAR16:
        source = _read_small(found, CIFAR16_SHAPE)
    else:
        full = cifar.read_cifar(found)
        assert full.y is not None, "CIFAR-10 has labels"
        source = _halved(
            dataclasses.replace(full, x=full.x[:CIFAR16_TRAIN], y=full.y[:CIFAR16_TRAIN])
        )
    return dataclasses.replace(
        source, name="CIFAR-10 at 16x16", scale=255.0, mean=CIFAR16_MEAN, std=CIFAR16_STD
    )


def read_fashion14(found: Found) -> Source:
    """Return all images of Fashion-MNIST, [N, 1, 14, 14]."""
    if found.layout is FASHION14:
        source = _read_small(found, FASHION14_SHAPE)
    else:
        source = _halved(idx.read_fashion(found))
    return dataclasses.replace(
        source, name="Fashion-MNIST at 14x14", scale=255.0, mean=FASHION14_MEAN, std=FASHION14_STD
    )


SMALL_CIFAR = DataSet(
    "CIFAR-10 at 16x16", (CIFAR16, *cifar.LAYOUTS), cifar.HOW_TO_GET, read_cifar16
)
SMALL_FASHION = DataSet(
    "Fashion-MNIST at 14x14", (FASHION14, idx.FASHION), idx.HOW_TO_GET, read_fashion14
)


def halve(images: Array) -> Array:
    """Return bytes [N, C, H, W] with every 2x2 pixels averaged; H and W are even."""
    rows = np.add(images[..., ::2, :], images[..., 1::2, :], dtype=np.uint16)
    sums = rows[..., ::2] + rows[..., 1::2]
    # Halves go to the even neighbour, as numpy rounds: up by a bit more where the quotient is odd.
    is_odd = (sums >> 2) & 1
    averaged: Array = ((sums + 1 + is_odd) >> 2).astype(np.uint8)
    return averaged


def _halved(source: Source) -> Source:
    assert source.x_test is not None, "both data sets have a test split"
    return dataclasses.replace(source, x=halve(source.x), x_test=halve(source.x_test))


def _read_small(found: Found, shape: tuple[int, ...]) -> Source:
    (path,) = found.files
    source = read_npz(path)
    if source.x.dtype != np.uint8 or source.x.shape[1:] != shape or source.x_test is None:
        raise DataError(
            f"{path} should hold x_train and x_test, bytes of shape N x "
            f"{' x '.join(map(str, shape))}; got {source.x.dtype} of shape {source.x.shape}"
            f"{'' if source.x_test is not None else ' without a test part'}"
        )
    return source


NUM_CLASSES = 10
GREY_LEVELS = 16.0
# Statistics of all pixels divided by 16; fixed, so that the split does not change the input.
MEAN, STD = 0.3053, 0.3760


def read_digits() -> Source:
    """Return the digits as images [N, 1, 8, 8]; they have no official test split."""
    # The file is read directly: importing scikit-learn takes most of a second in every process.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; "
            "install it with: pip install scikit-learn"
        )
    table = np.loadtxt(
        Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"),
        delimiter=",",
        dtype=np.int64,
    )
    images, labels = table[:, :-1], table[:, -1]
    return Source(
        name="digits",
        origin="scikit-learn's digits",
        x=images.reshape(-1, 1, 8, 8).astype(np.uint8),
        y=labels,
        num_classes=NUM_CLASSES,
        scale=GREY_LEVELS,
        mean=(MEAN,),
        std=(STD,),
    )


class _OnDisk(Task):
    """A data set in its known layouts, or the user's own file with images of that shape."""

    data_set: ClassVar[DataSet]

    def find(self, data_path: DataPath | None = None) -> str:
        """Return where the files lie."""
        if self._is_own_file(data_path):
            return str(data_path)
        return str(self.data_set.find(data_path).folder)

    def read(self, data_path: DataPath | None) -> Source:
        """Return the data set, or the user's own file."""
        if data_path is not None and self._is_own_file(data_path):
            return open_data(data_path)
        return self.data_set.read(self.data_set.find(data_path))

    def _is_own_file(self, data_path: DataPath | None) -> bool:
        """Whether the user gave a file that is not part of the data set."""
        if data_path is None or existing(data_path).is_dir():
            return False
        layouts = self.data_set.layouts
        known = {name for layout in layouts for names in layout.files for name in names}
        return Path(data_path).name not in known


_TUNED: dict[str, Any] = {"schedule": SCHEDULE, "warmup": WARM_UP}
"""Learning-rate schedule of tasks whose rate was tuned with it."""


def _digits_config(**settings: Any) -> TaskConfig:
    return TaskConfig(
        input_shape=(1, 8, 8),
        samples_per_step=1024,
        horizon=60,
        val_fraction=0.25,
        test_fraction=0.2,
        **settings,
    )


@register_task("digits")
class Digits(Task):
    """Embedded 8x8 digits with a conv host of about 1 k parameters; needs no files."""

    defaults = _digits_config(
        host="cnn",
        host_options=CnnConfig(channels=(4, 8, 8), in_channels=1),
        batch_size=32,
        learning_rate=0.005,
    )

    def read(self, data_path: DataPath | None) -> Source:
        """Return the digits, or the user's own 8x8 images."""
        return read_digits() if data_path is None else open_data(data_path)


@register_task("digits_mlp")
class DigitsMlp(Digits):
    """Embedded 8x8 digits with a fully connected host of about 2 k parameters."""

    defaults = _digits_config(host="mlp", host_options=MlpConfig(), learning_rate=0.01)


@register_task("digits_residual")
class DigitsResidual(Digits):
    """Embedded 8x8 digits with a residual host of about 2 k parameters."""

    defaults = _digits_config(
        host="residual",
        host_options=ResidualConfig(channels=(4, 8, 8), in_channels=1),
        batch_size=32,
        learning_rate=0.05,
        **_TUNED,
    )


@register_task("digits_deep")
class DigitsDeep(Digits):
    """Embedded 8x8 digits with a conv host of five blocks, and so with five slots."""

    defaults = _digits_config(
        host="cnn",
        host_options=CnnConfig(channels=(4, 4, 8, 8, 8), in_channels=1, pool_layers=2),
        batch_size=32,
        learning_rate=0.05,
        **_TUNED,
    )


@register_task("fashion")
class Fashion(_OnDisk):
    """Fashion-MNIST with a small conv host."""

    data_set = idx.FASHION_MNIST
    defaults = TaskConfig(
        host="cnn",
        host_options=CnnConfig(channels=(8, 16, 16), in_channels=1),
        input_shape=(1, 28, 28),
        batch_size=128,
        learning_rate=0.05,
    )


def _cifar_config(
    channels: tuple[int, ...],
    kernel_size: int = 3,
    pool_layers: int | None = None,
    rows: tuple[int, ...] = (0,),
) -> TaskConfig:
    slots = tuple(slot_id(row, column) for row in rows for column in range(len(channels)))
    return TaskConfig(
        host="cnn",
        host_options=CnnConfig(
            channels=channels, kernel_size=kernel_size, pool_layers=pool_layers, slots=slots
        ),
        input_shape=(3, 32, 32),
        batch_size=128,
        learning_rate=0.05,
        augment="crop_flip",
    )


class _Cifar(_OnDisk):
    """CIFAR-10 from disk, in any of its layouts."""

    data_set = cifar.CIFAR


@register_task("cifar_baseline")
class CifarBaseline(_Cifar):
    """CIFAR-10 with the reference conv host, 8-16-32 channels."""

    defaults = _cifar_config(doubling(8, 3))


@register_task("cifar_scale")
class CifarScale(_Cifar):
    """CIFAR-10 with a deeper conv host, five blocks up to 128 channels."""

    defaults = _cifar_config(doubling(8, 5))


@register_task("cifar_impaired")
class CifarImpaired(_Cifar):
    """CIFAR-10 with a host of 77 parameters and 1x1 kernels: it sees colour, not form."""

    defaults = _cifar_config(doubling(1, 3), kernel_size=1)


@register_task("cifar_minimal")
class CifarMinimal(_Cifar):
    """CIFAR-10 with a host of 164 parameters, 1x1 kernels and no pooling."""

    defaults = _cifar_config(doubling(2, 3), kernel_size=1, pool_layers=0)


@register_task("cifar_multichannel")
class CifarMultichannel(_Cifar):
    """CIFAR-10 with the reference host and six slots, before and after each pool."""

    defaults = _cifar_config(doubling(8, 3), rows=(0, 1))


@register_task("cifar_postpool")
class CifarPostpool(_Cifar):
    """CIFAR-10 with a 16-32-64 host and slots after each pool, where growth is cheap."""

    defaults = _cifar_config(doubling(16, 3), rows=(1,))


@register_task("cifar_highres")
class CifarHighres(_Cifar):
    """CIFAR-10 with a 16-32-64 host and slots before each pool, where detail is kept."""

    defaults = _cifar_config(doubling(16, 3))


@register_task("cifar_deep_impaired")
class CifarDeepImpaired(_Cifar):
    """CIFAR-10 with five blocks of 1x1 kernels and ten slots."""

    defaults = _cifar_config(doubling(2, 5), kernel_size=1, rows=(0, 1))


def _small_config(channels: tuple[int, ...], shape: tuple[int, int, int]) -> TaskConfig:
    # Rate and schedule are tuned for the host without growth: research/campaign, tune_wsd.
    return TaskConfig(
        host="cnn",
        host_options=CnnConfig(channels=channels, in_channels=shape[0]),
        input_shape=shape,
        batch_size=128,
        learning_rate=0.1,
        seed_warmup=SEED_WARM_UP,
        horizon=60,
        **_TUNED,
    )


@register_task("cifar16")
class Cifar16(_OnDisk):
    """CIFAR-10 at 16x16 with the reference conv host, 8-16-32 channels."""

    data_set = SMALL_CIFAR
    defaults = _small_config(doubling(8, 3), CIFAR16_SHAPE)


@register_task("fashion14")
class Fashion14(_OnDisk):
    """Fashion-MNIST at 14x14 with a small conv host, 8-16-32 channels."""

    data_set = SMALL_FASHION
    defaults = _small_config(doubling(8, 3), FASHION14_SHAPE)
