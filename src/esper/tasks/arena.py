"""The families that ship with Esper, and the members that claims are measured on.

Values of an axis are chosen beforehand, never by what growing brings there. *select* and *claim*
differ from *train* in values that training never draws, so nothing learned by heart helps there;
Fashion-MNIST and the residual host are in *claim* alone. The claim members are opened at most
twice: whatever is improved is improved on *select*. The tables: docs/arena.md.
"""

from __future__ import annotations

from esper.tasks.family import Axes, Family, Purpose, register_family
from esper.tasks.member import Member
from esper.tasks.presets import Cifar16, CifarBaseline, Digits, Fashion14

EVEN = (0, 2, 4, 6, 8)
ODD = (1, 3, 5, 7, 9)

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

_CLAIMS: dict[Purpose, tuple[Member, ...]] = {
    # Narrow hosts with more clean images than training ever has.
    "lacks capacity": (
        Member(data=Cifar16.name, width=3, depth=3, train_size=25_000),
        Member(data=Cifar16.name, width=5, depth=3, train_size=25_000),
        Member(data=Cifar16.name, width=7, depth=3, train_size=25_000),
        Member(data=Cifar16.name, host="residual", width=4, depth=2, train_size=25_000),
        Member(data=Cifar16.name, host="residual", width=4, depth=3, train_size=25_000),
        Member(data=Cifar16.name, host="residual", width=8, depth=2, train_size=25_000),
        Member(data=Cifar16.name, host="residual", width=8, depth=3, train_size=25_000),
        Member(data=Fashion14.name, width=2, depth=3, train_size=25_000),
        Member(data=Fashion14.name, width=3, depth=3, train_size=25_000),
        Member(data=Fashion14.name, width=5, depth=2, train_size=25_000),
        Member(data=Fashion14.name, host="residual", width=4, depth=2, train_size=25_000),
        Member(data=Fashion14.name, host="residual", width=4, depth=3, train_size=25_000),
    ),
    # Hosts that are wide enough for what there is to learn in the time they have.
    "neutral": (
        Member(data=Cifar16.name, width=32, depth=3, train_size=25_000),
        Member(data=Cifar16.name, width=48, depth=3, train_size=25_000),
        Member(data=Cifar16.name, host="residual", width=32, depth=3, train_size=25_000),
        Member(data=Fashion14.name, width=20, depth=3, train_size=25_000),
        Member(data=Fashion14.name, width=32, depth=2, train_size=25_000),
        Member(data=Fashion14.name, host="residual", width=20, depth=3, train_size=25_000),
    ),
    # Too few images, or too many wrong labels, for any more capacity to be filled rightly.
    "useless or harmful": (
        Member(data=Cifar16.name, width=10, depth=3, train_size=1_000),
        Member(data=Cifar16.name, width=10, depth=3, train_size=4_000, label_noise=0.6),
        Member(data=Cifar16.name, host="residual", width=8, depth=3, train_size=1_000),
        Member(data=Fashion14.name, width=10, depth=3, train_size=500),
        Member(data=Fashion14.name, width=10, depth=3, train_size=4_000, label_noise=0.6),
        Member(data=Fashion14.name, host="residual", width=8, depth=3, train_size=500),
    ),
}

IMAGE16_FAMILY = register_family(
    Family(
        name="image16_family",
        summary="CIFAR-10 at 16x16 with conv hosts of 2 or 4 blocks; controllers train here.",
        train=Axes(
            data=(Cifar16.name,),
            width=(4, 8, 16),
            depth=(2, 4),
            classes=((), EVEN),
            train_size=(2_000, 6_000, 20_000),
            label_noise=(0.0, 0.2, 0.4),
            horizon=(40, 60),
            rate_factor=(0.5, 1.0, 2.0),
        ),
        select=Axes(
            data=(Cifar16.name,),
            width=(6, 12),
            depth=(3,),
            classes=((), ODD),
            train_size=(3_000, 12_000),
            label_noise=(0.0, 0.3),
            horizon=(50, 60),
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
