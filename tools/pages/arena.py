"""The page Arena: axes, members and rates of the families, from `esper.lab.tasks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from esper.lab.tasks import FAMILIES, Family, Member, get_family
from esper.lab.tasks.member import GROWTH_LIMIT, RATES, SCHEDULE, SEED_WARM_UP, WARM_UP

_INTRODUCTION = """\
# The arena

Controllers are trained, chosen and judged on families of tasks. A *family* is a set of tasks, its
*members*, that differ along axes: kind, width and depth of the host, position of its slots, data
set and classes, number of training images, share of wrong labels, length of a run, and the learning
rate as a multiple of the best one without growth. A schedule that suits one member does harm on
another, so no fixed schedule suits a whole family.

`python -m tools.pages` makes this page from `esper.lab.tasks.family_presets` and
`esper.lab.tasks.member`.
`esper tasks --family NAME` prints the same tables.

## Splits

* **train**: `esper train` draws new members in every round. A round has few architectures
  (`architectures_per_round`), each with many conditions, so that rows of one architecture run as
  one stack. Rows with the same environment seed share the member, and so their twin.
* **select**: the best policy of a run is chosen on these members, and so are all other choices.
  Training never uses their widths; some noise levels and numbers of images are new too.
* **claim**: published results are measured on this fixed list, at most twice. Fashion-MNIST and
  the residual host occur only here. Members were chosen by their axis values before anything was
  grown on them: hosts that lack capacity, hosts that are large enough, and data that is too little
  or too noisy for more capacity.

The label of a member lists its values: `cifar16 residual 8x3 pooled, 25000 images, 60 epochs` is a
residual host of three blocks on CIFAR-10 at 16x16 whose channels start at 8 and double from block
to block, with a slot after every pool. No member may grow beyond {limit:g} times its host's
parameters or operations. The learning rate follows `{schedule}` with {warm_up:.0%} warm-up; that of
a new seed rises for {seed_warm_up} epochs.

The families `depth_small` and `depth_family` ask another question: *how deep* should a network be
for a budget of compute? Their members start with one block, copies double it, and every run ends
when its FLOPs are spent. Members are drawn by a generator (`esper.lab.tasks.arena`), and those of
claim are drawn by the SHA-256 of the weights that are judged, so nobody can choose it. How many
samples there are, how many labels are wrong and how hard the data is, no arm is told; what may be
known is the kind and size of the network, the shape of its input and the budget in steps of the
network it starts with. `research/arena` has what was measured.

In Python: `get_family("image16_family").draw(seed, architectures=4, conditions=16)` returns members
by architecture, and `member.task()` is a task like any other.
"""

_RATES = """\
## Learning rates

The best learning rate of a host that never grows, by data set, host and number of training images.
Between two sizes it is interpolated as a power of the size; beyond them it is constant.
`rate_factor` multiplies it.

{table}

The plain hosts at 16x16 and 14x14 were measured with 20,000 and 2,000 images
(`research/campaign/results/tune_wsd.jsonl`, `python -m benchmarks tune_hosts --summary`): 0.1 is
within 0.7 validation points of the best for every host with 20,000 images; with 2,000 the best rate
was the lowest tried. The residual host's rate with 8,000 to 28,000 images is from
`research/campaign/results/residual.jsonl`, the digits' from `tune_digits.jsonl` beside it (0.2 is
best with 200 images and within 0.5 points of it with all). All others are copied from these and
were not measured.
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
        f"{len(family.architectures('select'))}; impossible combinations are left out."
    )
    parts = [f"## `{family.name}`", family.summary, axes, sizes]
    if family.claim_draws is not None:
        drawn = family.claim_draws
        claim = _table(
            ("axis", "claim"), ((name, _values(name, values)) for name, values in drawn.items())
        )
        parts += [
            "### Claim",
            f"{drawn.count} members, drawn by the weights that are judged.",
            claim,
        ]
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
