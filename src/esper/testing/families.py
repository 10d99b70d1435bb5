"""`check_family`: the contract of a family as a function anyone can run on one of their own."""

from __future__ import annotations

from esper.leyline.errors import UsageError
from esper.tasks.family import FamilySplit, get_family
from esper.tasks.member import TRAIN_SIZES
from esper.tasks.task import DataPath, get_task
from esper.testing.hosts import check_host

_DRAWN: tuple[FamilySplit, ...] = ("train", "select")
"""What has to have members: the one is trained on, the best is chosen on the other."""


def check_family(name: str, data_path: DataPath | None = None) -> None:
    """Raise with one line if a registered family breaks the contract.

    Every architecture of every split is built and runs through the contract of its host, draws are
    repeated, and the sizes by which members are possible are held against the data.

    Args:
        name: The name it is registered under.
        data_path: Where its data lies; None for the usual places.
    """
    family = get_family(name)
    for split in _DRAWN:
        if not family.members(split):
            raise UsageError(f"family {name!r} has no members to {split}")
        first, second = (family.draw(3, split, architectures=2, conditions=2) for _ in range(2))
        if first != second:
            raise UsageError(f"family {name!r}: two draws of {split} members by one seed differ")
    every = [member for split in (*_DRAWN, "claim") for member in family.members(split)]
    for architecture in dict.fromkeys(member.architecture for member in every):
        member = next(each for each in every if each.architecture == architecture)
        task = member.task()
        check_host(task.config.host, task.config.host_options, task.example_input(2))
    for data in dict.fromkeys(member.data for member in every):
        found = get_task(data).load(data_path).size("train")
        if found != TRAIN_SIZES[data]:
            raise UsageError(
                f"family {name!r}: {data} has {found:,} training images, and "
                f"esper.tasks.member.TRAIN_SIZES says {TRAIN_SIZES[data]:,}"
            )
