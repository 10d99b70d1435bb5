"""The families that ship with Esper, and the members that claims are measured on.

Values of an axis are chosen beforehand, never by what growing brings there. *select* and *claim*
differ from *train* in values that training never draws, so nothing learned by heart helps there;
Fashion-MNIST and the residual host are in *claim* alone. The claim members are opened at most
twice: whatever is improved is improved on *select*. The tables: docs/arena.md.
"""

from __future__ import annotations

from typing import Any

from esper.tasks.family import Axes, Family, Purpose, register_family
from esper.tasks.member import Member
from esper.tasks.presets import Cifar16, CifarBaseline, Digits, Fashion14

EVEN = (0, 2, 4, 6, 8)
ODD = (1, 3, 5, 7, 9)
EASY = (0, 6, 9)
"""Aeroplane, frog and truck: an easy task, so that few images do not always mean many errors."""

DIGITS_FAMILY = register_family(
    Family(
        name="digits_family",
        summary="Embedded digits with conv hosts, few images, wrong labels; fit for a CPU.",
        train=Axes(
            data=(Digits.name,),
            width=(2, 4, 8),
            depth=(2, 3),
            train_size=(0, 600, 200),
            label_noise=(0.0, 0.1, 0.4),
            horizon=(40, 60),
            rate_factor=(0.25, 1.0),
        ),
        select=Axes(
            data=(Digits.name,),
            width=(3, 6),
            depth=(2, 3),
            train_size=(0, 400),
            label_noise=(0.0, 0.2),
        ),
    )
)


def _claim(data: str, width: int, depth: int, train_size: int, **other: Any) -> Member:
    return Member(
        data=data, width=width, depth=depth, slots="pools", train_size=train_size, **other
    )


_CLAIMS: dict[Purpose, tuple[Member, ...]] = {
    # Shallow hosts with more clean images than training ever has.
    "lacks capacity": (
        *(_claim(Cifar16.name, width, 2, 25_000) for width in (5, 7, 10, 14, 20)),
        *(_claim(Cifar16.name, width, 2, 25_000, host="residual") for width in (4, 8)),
        *(_claim(Fashion14.name, width, 2, 25_000) for width in (3, 5, 10)),
        *(_claim(Fashion14.name, width, 2, 25_000, host="residual") for width in (4, 8)),
    ),
    # Hosts that are deep and wide enough for what there is to learn in the time they have.
    "neutral": (
        *(_claim(Cifar16.name, width, 3, 25_000) for width in (32, 48)),
        _claim(Cifar16.name, 32, 3, 25_000, host="residual"),
        *(_claim(Fashion14.name, width, 3, 25_000) for width in (20, 32)),
        _claim(Fashion14.name, 20, 3, 25_000, host="residual"),
    ),
    # Too few images, or too many wrong labels, for any more capacity to be filled rightly.
    "useless or harmful": (
        _claim(Cifar16.name, 10, 3, 1_000),
        _claim(Cifar16.name, 10, 3, 4_000, label_noise=0.6),
        _claim(Cifar16.name, 8, 3, 1_000, host="residual"),
        _claim(Fashion14.name, 10, 3, 500),
        _claim(Fashion14.name, 10, 3, 4_000, label_noise=0.6),
        _claim(Fashion14.name, 8, 3, 500, host="residual"),
    ),
}

IMAGE16_FAMILY = register_family(
    Family(
        name="image16_family",
        summary="CIFAR-10 at 16x16 with conv hosts of 2 or 3 blocks; controllers train here.",
        train=Axes(
            data=(Cifar16.name,),
            width=(4, 8, 16),
            depth=(2, 3),
            slots=("pools",),
            classes=((), EVEN, EASY),
            train_size=(600, 2_000, 6_000, 20_000),
            label_noise=(0.0, 0.2, 0.4),
            horizon=(40, 60),
            rate_factor=(0.5, 1.0, 2.0),
        ),
        select=Axes(
            data=(Cifar16.name,),
            width=(6, 12),
            depth=(2, 3),
            slots=("pools",),
            classes=((), ODD),
            train_size=(3_000, 12_000),
            label_noise=(0.0, 0.3),
        ),
        claims=_CLAIMS,
    )
)

CIFAR_FAMILY = register_family(
    Family(
        name="cifar_family",
        summary="CIFAR-10 at 32x32 with conv hosts of 2 or 4 blocks, varied images.",
        train=Axes(
            data=(CifarBaseline.name,),
            width=(4, 8, 16, 32),
            depth=(2, 4),
            train_size=(2_000, 10_000, 40_000),
            label_noise=(0.0, 0.2, 0.4),
            horizon=(40, 60),
            rate_factor=(0.5, 1.0, 2.0),
        ),
        select=Axes(
            data=(CifarBaseline.name,),
            width=(6, 12),
            depth=(3,),
            train_size=(4_000, 30_000),
            label_noise=(0.0, 0.3),
        ),
    )
)
