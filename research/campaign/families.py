"""Families of the campaign's own: little data without a claim, and hosts of a million parameters.

    esper prove tamiyo wait ... --import research/campaign/families.py --family image16_few

`image16_few` asks whether a controller leaves hosts alone that have too few images for more
capacity, on hard tasks and on easy ones. `image16_million` has the hosts of the claim's kinds in
which growing pays (*select*) and does not (*train*), at a size that none of its members has.
"""

from __future__ import annotations

from esper.lab.tasks import Axes, Family, register_family

FEW = register_family(
    Family(
        name="image16_few",
        summary="CIFAR-10 at 16x16, 800 images on hosts of three blocks: growing is of no use.",
        train=Axes(data=("cifar16",), width=(4,), depth=(3,), slots=("pools",), train_size=(900,)),
        select=Axes(
            data=("cifar16",),
            width=(6, 12),
            depth=(3,),
            slots=("pools",),
            classes=((), (1, 3, 5, 7, 9), (1, 4, 8)),
            train_size=(800,),
            label_noise=(0.0, 0.3),
        ),
    )
)

MILLION = register_family(
    Family(
        name="image16_million",
        summary="CIFAR-10 at 16x16, hosts of 1.1 million parameters in two and in three blocks.",
        train=Axes(
            data=("cifar16",), width=(112,), depth=(3,), slots=("pools",), train_size=(25_000,)
        ),
        select=Axes(
            data=("cifar16",), width=(248,), depth=(2,), slots=("pools",), train_size=(25_000,)
        ),
    )
)
