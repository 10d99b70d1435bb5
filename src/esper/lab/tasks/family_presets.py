"""The families that ship with Esper, and their claim members."""

from __future__ import annotations

from typing import Any

from esper.lab.tasks import arena
from esper.lab.tasks.arena import Draws
from esper.lab.tasks.family import Axes, Family, Purpose, register_family
from esper.lab.tasks.member import Member
from esper.lab.tasks.presets import Cifar16, CifarBaseline, Digits, Fashion14
from esper.lab.tasks.texts import Chain, Copies, Facts, Sorting, Sources, Sums

EVEN = (0, 2, 4, 6, 8)
ODD = (1, 3, 5, 7, 9)
EASY = (0, 6, 9)
"""Aeroplane, frog and truck: an easy task, on which few images do not mean many errors."""

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
    # Shallow hosts with more clean images than any train member has.
    "lacks capacity": (
        *(_claim(Cifar16.name, width, 2, 25_000) for width in (5, 7, 10, 14, 20)),
        *(_claim(Cifar16.name, width, 2, 25_000, host="residual") for width in (4, 8)),
        *(_claim(Fashion14.name, width, 2, 25_000) for width in (3, 5, 10)),
        *(_claim(Fashion14.name, width, 2, 25_000, host="residual") for width in (4, 8)),
    ),
    # Hosts that are deep and wide enough for their data and horizon.
    "neutral": (
        *(_claim(Cifar16.name, width, 3, 25_000) for width in (32, 48)),
        _claim(Cifar16.name, 32, 3, 25_000, host="residual"),
        *(_claim(Fashion14.name, width, 3, 25_000) for width in (20, 32)),
        _claim(Fashion14.name, 20, 3, 25_000, host="residual"),
    ),
    # Too few images, or too many wrong labels, for more capacity to help.
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


_TEXTS = (Chain.name, Copies.name, Facts.name, Sorting.name, Sources.name)
_TEXT_STEPS = (460, 1_000)
_TRAIN_LEVELS = {Copies.name: (5, 7), Facts.name: (150, 300), Sorting.name: (3, 5)}
_SELECT_LEVELS = {Copies.name: (6,), Facts.name: (200,), Sorting.name: (4,)}
_CLAIM_LEVELS = {
    Copies.name: (4, 5, 6, 7, 8),
    Facts.name: (100, 250, 500),
    Sorting.name: (3, 4, 6),
    Sums.name: (2, 3),
}

DEPTH_SMALL = register_family(
    Family(
        name="depth_small",
        summary="Networks of one block under a budget of compute, on embedded data; two cores.",
        train=Draws(
            key="train",
            count=30,
            data={"tcn": _TEXTS},
            width={"tcn": (24, 32)},
            levels=_TRAIN_LEVELS,
            train_size=(0,),
            label_noise=(0.0, 0.1, 0.3),
            steps={"tcn": _TEXT_STEPS},
        ),
        select=Draws(
            key="select",
            count=15,
            data={"tcn": _TEXTS},
            width={"tcn": (28,)},
            levels=_SELECT_LEVELS,
            train_size=(0,),
            label_noise=(0.0, 0.2),
            steps={"tcn": _TEXT_STEPS},
        ),
        # Transformers and sums are in claim alone.
        claim_draws=Draws(
            key="",
            count=36,
            data={"tcn": (*_TEXTS, Sums.name), "gpt": (*_TEXTS, Sums.name)},
            width={"tcn": (24, 30), "gpt": (24, 30)},
            levels=_CLAIM_LEVELS,
            train_size=(0,),
            label_noise=(0.0, 0.05, 0.4),
            steps={"tcn": _TEXT_STEPS, "gpt": (500, 1_000)},
        ),
        settings=arena.SETTINGS,
        search_settings=arena.SEARCH_SETTINGS,
        clone_settings=arena.CLONE_SETTINGS,
        proof_settings=arena.PROOF_SETTINGS,
    )
)

_ALL: tuple[int, ...] = ()

DEPTH_FAMILY = register_family(
    Family(
        name="depth_family",
        summary="Residual CNNs for images and for text, of one block, under a budget of compute.",
        train=Draws(
            key="train",
            count=48,
            data={"resnet": (Cifar16.name, Digits.name), "tcn": _TEXTS},
            width={"resnet": (8, 12), "tcn": (24, 32)},
            stages=(1, 2),
            classes=(_ALL, EVEN),
            levels=_TRAIN_LEVELS,
            train_size=(0, 1_000, 500),
            label_noise=(0.0, 0.3, 0.6),
            steps={"resnet": (2_000, 40_000), "tcn": _TEXT_STEPS},
        ),
        select=Draws(
            key="select",
            count=16,
            data={"resnet": (Cifar16.name, Digits.name), "tcn": _TEXTS},
            width={"resnet": (10,), "tcn": (28,)},
            stages=(1, 2),
            classes=(_ALL, ODD),
            levels=_SELECT_LEVELS,
            train_size=(0, 800),
            label_noise=(0.0, 0.2, 0.5),
            steps={"resnet": (2_000, 40_000), "tcn": _TEXT_STEPS},
        ),
        # Vision transformers, Fashion-MNIST and sums are in claim alone.
        claim_draws=Draws(
            key="",
            count=36,
            data={
                "resnet": (Cifar16.name, Fashion14.name),
                "vit": (Cifar16.name, Fashion14.name),
                "tcn": (*_TEXTS, Sums.name),
            },
            width={"resnet": (6, 9, 14), "vit": (24, 32), "tcn": (26, 30, 36)},
            stages=(1, 2),
            classes=(_ALL, EVEN, ODD),
            levels=_CLAIM_LEVELS,
            train_size=(0, 2_000, 700),
            label_noise=(0.0, 0.1, 0.4),
            steps={"resnet": (2_000, 40_000), "vit": (2_000, 40_000), "tcn": _TEXT_STEPS},
        ),
        settings=arena.SETTINGS,
        search_settings=arena.SEARCH_SETTINGS,
        clone_settings=arena.CLONE_SETTINGS,
        proof_settings=arena.PROOF_SETTINGS,
    )
)
