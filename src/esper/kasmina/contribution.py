"""What is measured of seeds: their contributions, by ablation, and their gradients.

Contributions come from per-sample results of every ablation on the same samples. All differences
are paired over samples, so each carries the standard error of a paired mean. f(A) is the mean value
per sample, in points, with exactly the seeds in A on (other seeds are left as they are).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from esper.kasmina.state import SlotState
from esper.leyline.actions import TensorRecord
from esper.leyline.reasons import format_contribution
from esper.leyline.stages import SeedStage
from esper.utils.process import Pending, to_device, to_host

FACTORIAL_LIMIT = 4
"""Up to this many seeds every subset is evaluated; beyond, subsets of up to two and all but one."""


def participating(state: SlotState, *, fossils: bool = False) -> Tensor:
    """Return bool [R, S]: the seeds whose contribution can be measured now.

    Fossils are included on request only: they stay whatever an ablation shows.
    """
    blended = state.has_module & (state.alpha > 0)
    return blended if fossils else blended & (state.stage != int(SeedStage.FOSSILIZED))


def plan_ablations(members: Sequence[bool]) -> Tensor:
    """Return bool [K, S]: the configurations for these participating slots, all-on first.

    A slot that does not take part is on everywhere (it is left as it is).
    """
    return _plan(tuple(bool(member) for member in members)).clone()


@lru_cache(maxsize=1024)
def _plan(members: tuple[bool, ...]) -> Tensor:
    seeds = [index for index, member in enumerate(members) if member]
    count = len(seeds)
    if count <= FACTORIAL_LIMIT:
        sizes = list(range(count, -1, -1))
    else:
        sizes = sorted({count, count - 1, 2, 1, 0}, reverse=True)
    rows = []
    for size in sizes:
        for chosen in itertools.combinations(seeds, size):
            rows.append([not member or index in chosen for index, member in enumerate(members)])
    return torch.tensor(rows, dtype=torch.bool)


@lru_cache(maxsize=64)
def count_ablations(seeds: int) -> int:
    """Return how many configurations `plan_ablations` has for so many participating seeds."""
    return len(_plan((True,) * seeds))


_VELOCITY_MEMORY = 0.7


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean in points with its standard error (NaN with fewer than two samples)."""

    value: float
    se: float

    def __str__(self) -> str:
        return format_contribution(self.value, self.se)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """Contributions of the seeds of one network as it is now.

    These are losses that ablations would cause, not gains of growth: the host has learned to rely
    on its seeds. The gain of growth is the difference to a twin.
    """

    score: Estimate
    """f(all): the network as it is."""
    all_off: Estimate
    """f(all) - f(none): what all seeds give together."""
    leave_one_out: Mapping[str, Estimate]
    """f(all) - f(all but i)."""
    solo_on: Mapping[str, Estimate]
    """f({i}) - f(none)."""
    pairs: Mapping[tuple[str, str], Estimate]
    """f({i, j}) - f(none)."""
    interactions: Mapping[tuple[str, str], Estimate]
    """f({i, j}) - f({i}) - f({j}) + f(none)."""
    shapley: Mapping[str, Estimate] = field(default_factory=dict)
    """Mean marginal worth over all orders; only for up to four seeds."""


def values_in_points(loss: Tensor, correct: Tensor | None) -> Tensor:
    """Return float64 values per sample: 100 x correctness, or the negative loss without labels."""
    if correct is None:
        return -loss.to(torch.float64)
    return 100.0 * correct.to(torch.float64)


def estimate_contributions(
    configurations: Tensor, values: Tensor, members: Sequence[bool], names: Sequence[str]
) -> Contributions:
    """Estimate everything the configurations [K, S] and values [K, M] allow."""
    seeds = [index for index, member in enumerate(members) if member]
    lookup = {
        frozenset(i for i in seeds if row[i]): values[k]
        for k, row in enumerate(configurations.tolist())
    }
    everyone, nobody = frozenset(seeds), frozenset[int]()
    pairs = list(itertools.combinations(seeds, 2))

    def f(*chosen: int) -> Tensor:
        return lookup[frozenset(chosen)]

    return Contributions(
        score=_estimate(lookup[everyone]),
        all_off=_estimate(lookup[everyone] - lookup[nobody]),
        leave_one_out={
            names[i]: _estimate(lookup[everyone] - lookup[everyone - {i}]) for i in seeds
        },
        solo_on={names[i]: _estimate(f(i) - lookup[nobody]) for i in seeds},
        pairs={(names[i], names[j]): _estimate(f(i, j) - lookup[nobody]) for i, j in pairs},
        interactions={
            (names[i], names[j]): _estimate(f(i, j) - f(i) - f(j) + lookup[nobody])
            for i, j in pairs
        },
        shapley={names[i]: _estimate(_shapley(lookup, seeds, i)) for i in seeds}
        if len(seeds) <= FACTORIAL_LIMIT
        else {},
    )


def record_contributions(
    state: SlotState, members: Tensor, worth: Tensor, error: Tensor, interaction: Tensor
) -> SlotState:
    """Record new measurements at `members` [R, S]; worth and error in points [R, S].

    Interactions are replaced as a whole: those not measured now are zero.
    """
    again = torch.isfinite(state.contribution)
    change = torch.where(again, worth - state.contribution, torch.zeros_like(worth))
    velocity = _VELOCITY_MEMORY * state.contribution_velocity + (1 - _VELOCITY_MEMORY) * change
    everywhere = torch.ones_like(members)
    state = state.where(everywhere, interaction=interaction)
    return state.where(
        members,
        contribution=worth,
        contribution_se=error,
        contribution_velocity=torch.where(again, velocity, state.contribution_velocity),
        counterfactual_age=0,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of the ablations of all rows; float64 on the CPU."""

    loss: Tensor
    """[R], validation loss with every seed as it is."""
    score: Tensor
    """[R], in points."""
    worth: Tensor
    """[R, S], NaN where not measured."""
    error: Tensor
    """[R, S], NaN where not measured."""
    interaction: Tensor
    """[R, S, S], 0 where not measured."""


@lru_cache(maxsize=1024)
def plan_differences(members: tuple[bool, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the configurations to compare, by position in the plan of these slots.

    (slot,) has f(all) and f(all but the slot); (i, j) has f({i, j}), f({i}), f({j}) and f(none).
    """
    seeds = [slot for slot, member in enumerate(members) if member]
    rows = plan_ablations(members).tolist()
    where = {frozenset(s for s in seeds if row[s]): k for k, row in enumerate(rows)}
    everyone = frozenset(seeds)
    found: dict[tuple[int, ...], tuple[int, ...]] = {
        (slot,): (0, where[everyone - {slot}]) for slot in seeds
    }
    for i, j in itertools.combinations(seeds, 2):
        found[i, j] = tuple(where[frozenset(some)] for some in ((i, j), (i,), (j,), ()))
    return found


def compare_rows(
    members: Tensor, plans: Sequence[Tensor], loss: Tensor, values: Tensor
) -> Pending[Measured]:
    """Estimate all rows' contributions; loss and values are [sum of K, M], on any device.

    Everything is computed where the values are; one small block comes back. A row without a plan
    shows NaN.
    """
    starts = [0, *itertools.accumulate(map(len, plans))]
    solo_at: list[tuple[int, ...]] = []
    solo: list[tuple[int, ...]] = []
    pair_at: list[tuple[int, ...]] = []
    pairs: list[tuple[int, ...]] = []
    for row, pattern in enumerate(members.tolist()):
        start = starts[row]
        for slots, places in plan_differences(tuple(pattern)).items():
            at, lines = (pair_at, pairs) if len(slots) == 2 else (solo_at, solo)
            at.append((row, *slots))
            lines.append(tuple(start + place for place in places))
    shown_at: list[tuple[int, ...]] = [(row,) for row, plan in enumerate(plans) if len(plan)]
    device = None if values.device.type == "cpu" else values.device
    (main,) = _columns([(starts[row],) for (row,) in shown_at], 1, device)
    whole, ablated = _columns(solo, 2, device)
    difference, means = values[whole] - values[ablated], values.mean(1)
    f_both, f_first, f_second, f_none = (means[place] for place in _columns(pairs, 4, device))
    parts = (
        loss[main].to(torch.float64).mean(1),
        values[main].mean(1),
        difference.mean(1),
        standard_error(difference),
        f_both - f_first - f_second + f_none,
    )
    block = torch.cat(parts)
    copied = to_host(block) if device else lambda: block

    def measured() -> Measured:
        own_loss, score, worth, error, together = copied().split([len(part) for part in parts])
        rows, slots = members.shape
        above = _spread(together, pair_at, (rows, slots, slots), rest=0.0)
        return Measured(
            _spread(own_loss, shown_at, (rows,)),
            _spread(score, shown_at, (rows,)),
            _spread(worth, solo_at, (rows, slots)),
            _spread(error, solo_at, (rows, slots)),
            above + above.mT,
        )

    return measured


def _columns(
    lines: Sequence[tuple[int, ...]], width: int, device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """Return the columns of a table with so many, as int64 [lines] on the CPU or a GPU."""
    table = torch.tensor(lines, dtype=torch.int64).reshape(len(lines), width)
    return (table if device is None else to_device(table, device)).unbind(1)


def _spread(
    values: Tensor, at: Sequence[tuple[int, ...]], shape: tuple[int, ...], rest: float = math.nan
) -> Tensor:
    """Return a float64 tensor of this shape with values at some places and `rest` elsewhere."""
    result = torch.full(shape, rest, dtype=torch.float64)
    result[_columns(at, len(shape))] = values
    return result


def standard_error(samples: Tensor) -> Tensor:
    """Return the standard error [n] of the means of samples [n, M]; NaN with fewer than two.

    By two sums, not by `std`, whose last bits depend on how many rows there are.
    """
    count = samples.shape[1]
    if count < 2:
        return torch.full_like(samples[:, 0], torch.nan)
    spread = (samples - samples.mean(1, keepdim=True)).square().sum(1)
    return (spread / (count - 1) / count).sqrt()


def _shapley(lookup: Mapping[frozenset[int], Tensor], seeds: Sequence[int], seed: int) -> Tensor:
    others = [other for other in seeds if other != seed]
    total = torch.zeros_like(lookup[frozenset()])
    for size in range(len(others) + 1):
        weight = 1.0 / (len(seeds) * math.comb(len(others), size))
        for chosen in itertools.combinations(others, size):
            total = total + weight * (
                lookup[frozenset((*chosen, seed))] - lookup[frozenset(chosen)]
            )
    return total


def _estimate(samples: Tensor) -> Estimate:
    return Estimate(float(samples.mean()), float(standard_error(samples[None])))


# ---- Gradients of seeds: norms, health, ratio to the host


VANISHING = 1e-7
"""A gradient tensor with a smaller norm has vanished."""

EXPLODING = 50.0
"""A gradient tensor with a larger norm explodes."""

_RATIO_MEMORY = 0.9
_RATIO_CAP = 10.0
_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class GradientSample(TensorRecord):
    """Gradient statistics of some seeds in one batch; tensors of one shape, on the CPU."""

    norm: Tensor
    """float64, global L2 norm."""
    health: Tensor
    """float64 in [0, 1]."""
    vanishing: Tensor
    """bool."""
    exploding: Tensor
    """bool."""
    ratio: Tensor
    """float64, gradient per parameter relative to the host's, capped."""


def tensor_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return float64 [P]: the norm of every parameter's gradient that exists."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.to(torch.float64) for norm in norms])


def summarise(
    norms: Tensor,
    seed_params: Tensor | int,
    host_norm: Tensor,
    host_params: Tensor | int,
    *,
    counts: Tensor | None = None,
) -> GradientSample:
    """Turn per-tensor norms [..., P] of seeds into one sample per seed [...].

    Where seeds have different numbers of tensors, `counts` [...] says how many of the P are theirs;
    the others, behind them, are zeros.
    """
    most = norms.shape[-1]
    if counts is None:
        counts = torch.full(norms.shape[:-1], most, device=norms.device)
    is_there = torch.arange(most, device=norms.device) < counts.unsqueeze(-1)
    # One after another, so that zeros behind them change nothing, not even the last bit.
    squares = norms.square().cumsum(-1)
    norm = squares[..., -1].sqrt() if most else norms.sum(-1)
    vanished = (is_there & (norms < VANISHING)).sum(-1)
    # A non-finite norm compares false with any threshold; it explodes all the same.
    exploded = (is_there & ~(norms <= EXPLODING)).sum(-1)
    share = 1.0 / counts.clamp(min=1).to(torch.float64)
    health = (1 - 0.5 * share * vanished - 0.8 * share * exploded).clamp(0, 1)
    host_size = torch.as_tensor(host_params, dtype=torch.float64).clamp(min=1).sqrt()
    seed_size = torch.as_tensor(seed_params, dtype=torch.float64).clamp(min=1).sqrt()
    ratio = (norm / seed_size.to(norm.device)) / (host_norm / host_size.to(norm.device))
    tiny = (norm < _TINY) | (host_norm < _TINY)
    ratio = torch.where(tiny, torch.zeros_like(ratio), ratio.clamp(max=_RATIO_CAP))
    return GradientSample(norm, health, vanished > 0, exploded > 0, ratio)


def sample_gradients(
    state: SlotState, host: nn.Module, slots: Sequence[nn.Module]
) -> dict[int, GradientSample]:
    """Return the samples of one network's seeds in TRAINING and BLENDING, by slot."""
    active = (state.stage == int(SeedStage.TRAINING)) | (state.stage == int(SeedStage.BLENDING))
    indices = active[0].nonzero().flatten().tolist()
    if not indices:
        return {}
    host_norms = tensor_norms(host.parameters()).cpu()
    host_norm = host_norms.square().sum().sqrt()
    host_size = sum(p.numel() for p in host.parameters() if p.requires_grad)
    samples = {}
    for index in indices:
        norms = tensor_norms(slots[index].parameters()).cpu()
        size = int(state.params[0, index])
        samples[index] = summarise(norms, size, host_norm, host_size)
    return samples


def record_gradients(state: SlotState, mask: Tensor, sample: GradientSample) -> SlotState:
    """Record a sample [R, S] at `mask`; the ratio is smoothed over epochs."""
    smoothed = _RATIO_MEMORY * state.grad_ratio + (1 - _RATIO_MEMORY) * sample.ratio
    return state.where(
        mask,
        grad_norm=sample.norm.nan_to_num(math.inf),
        grad_health=sample.health,
        vanishing=sample.vanishing,
        exploding=sample.exploding,
        grad_ratio=torch.where(torch.isnan(state.grad_ratio), sample.ratio, smoothed),
    )
