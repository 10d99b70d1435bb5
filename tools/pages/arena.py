"""The page Arena: axes, members and rates of the families, from `esper.lab.tasks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from esper.lab.tasks import FAMILIES, Family, Member, get_family
from esper.lab.tasks.member import GROWTH_LIMIT, RATES, SCHEDULE, SEED_WARM_UP, WARM_UP

_INTRODUCTION = """\
# The arena

Where controllers are trained, chosen and judged. A *family* is a set of tasks that differ along
axes: the host's kind, width and depth, where its slots are, the data set and its classes, the
number of training images, the share of wrong labels, the length of a run, and how far the learning
rate is from the one that suits the waiting host. What is right on one member is wrong on another,
so no fixed schedule is right for a family.

This page is written by `python -m tools.pages`; the tables behind it are
`esper.lab.tasks.family` and `esper.lab.tasks.member`. `esper tasks --family NAME` lists the same.

## Splits

* **train**: what `esper train` draws, every round anew. Few architectures a round
  (`architectures_per_round`), each with many conditions, so that rows of one architecture can run
  as one stack. Rows that share an environment seed share the member, and so their twin.
* **select**: what the best policy of a run is chosen by, and whatever else is improved on. Training
  never draws any of its widths, and it has noise levels and numbers of images of its own.
* **claim**: a fixed list, on which is measured what is said of a controller. It is opened at most
  twice. Fashion-MNIST and the residual host are here alone. Members are chosen by the values of
  their axes, before anything was grown on them: hosts that lack capacity, hosts that are wide
  enough, and data that is too little or too noisy for more capacity.

A member names itself by its values: `cifar16 residual 8x3 pooled, 25000 images, 60 epochs` is a
residual host of three blocks on CIFAR-10 at 16x16 whose channels start at 8 and double from block
to block, with a slot after every pool. No member may grow beyond {limit:g} times its host's
parameters or operations. The learning rate follows `{schedule}` with {warm_up:.0%} warm-up; that of
a new seed rises for {seed_warm_up} epochs.

In Python: `get_family("image16_family").draw(seed, architectures=4, conditions=16)` returns members
by architecture, and `member.task()` is a task like any other.
"""

_RATES = """\
## Learning rates

The rate at which a host that only waits does best, by data set, host and number of training images;
between two sizes it is a power of the size, beyond them it stays. `rate_factor` multiplies it.

{table}

The plain hosts at 16x16 and 14x14 were measured with 20,000 and 2,000 images
(`research/campaign/results/tune_wsd.jsonl`, `python -m benchmarks tune_hosts --summary`): 0.1 is
within 0.7 validation points of the best for every host with 20,000 images; with 2,000 the best rate
was the lowest tried. The residual host's rate with 8,000 to 28,000 images is from
`research/campaign/results/residual.jsonl`, the digits' from `tune_digits.jsonl` beside it (0.2 is
best with 200 images and within 0.5 points of it with all). All others are taken over from these and
not measured.
"""


def render() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION.format(
            limit=GROWTH_LIMIT, schedule=SCHEDULE, warm_up=WARM_UP, seed_warm_up=SEED_WARM_UP
        )
    ]
    parts += [_family(get_family(name)) for name in FAMILIES.names()]
    rates = _table(
        ("data", "host", "images", "rate"),
        (
            (data, host, f"{size:,}", f"{rate:g}")
            for (data, host), known in RATES.items()
            for size, rate in known
        ),
    )
    parts.append(_RATES.format(table=rates))
    return "\n".join(parts)


def _family(family: Family) -> str:
    select = dict(family.select.items())
    axes = _table(
        ("axis", "train", "select"),
        (
            (name, _values(name, values), _values(name, select[name]))
            for name, values in family.train.items()
        ),
    )
    sizes = (
        f"{len(family.members('train'))} train members of "
        f"{len(family.architectures('train'))} architectures, "
        f"{len(family.members('select'))} select members of "
        f"{len(family.architectures('select'))}; what the data cannot give is left out."
    )
    parts = [f"## `{family.name}`", family.summary, axes, sizes]
    if family.claims:
        claims = _table(
            ("growth", "member", "parameters", "rate"),
            (
                (purpose, *_claim(member))
                for purpose, members in family.claims.items()
                for member in members
            ),
        )
        parts += ["### Claim", claims]
    return "\n\n".join(parts) + "\n"


def _claim(member: Member) -> tuple[str, str, str]:
    parameters = member.task().host_parameters
    return member.label, f"{parameters:,}", f"{member.learning_rate:.3g}"


def _values(axis: str, values: tuple[object, ...]) -> str:
    has_all = axis in ("classes", "train_size")
    return "; ".join("all" if has_all and not value else str(value) for value in values)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
