from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from esper.growth.gardener import Gardener
from esper.kasmina.evaluation import evaluate_contributions
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import GRADIENT_STRIDE, NAMES
from esper.kasmina.training import clip_gradients
from esper.leyline.errors import CheckpointError
from esper.utils.storage import load_tree, save_tree
from tests.plots import (
    SLOTS,
    frozen,
    halves,
    make_batches,
    make_evaluator,
    make_garden,
    parameters_by_name,
    raise_seed,
    record_contributions,
    same,
    train,
)

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.05}),
}

every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def make_gardener(kind: str = "sgd", seed: int = 0) -> tuple[Gardener, Optimizer]:
    gardener = Gardener(make_garden(seed), "wait", 100)
    factory, options = OPTIMIZERS[kind]
    return gardener, gardener.optimizer(factory, **options)


def entries(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    return {p: frozen(dict(entry)) for p, entry in optimizer.state.items()}


def members(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def covers(optimizer: Optimizer, garden: Garden) -> bool:
    """Whether the optimizer has every parameter of the garden exactly once, and no other."""
    ids = members(optimizer)
    return len(ids) == len(set(ids)) and set(ids) == {id(p) for p in garden.parameters()}


# ----------------------------------------------------------------------------- carrying the state


def fossilize(garden: Garden) -> Any:
    found = evaluate_contributions(garden, make_evaluator(), fossils=False)
    record_contributions(garden, found)
    return garden.fossilize("stem")


LIFE: tuple[tuple[str, Callable[[Garden], Any]], ...] = (
    ("germinate", lambda garden: garden.germinate("stem", "mlp_small", tempo=3)),
    ("start training", lambda garden: garden.advance("stem")),
    ("start blending", lambda garden: garden.advance("stem")),
    ("tick", Garden.tick),
    ("tick again", Garden.tick),
    ("reach the target", Garden.tick),
    ("hold", lambda garden: garden.advance("stem")),
    ("germinate another", lambda garden: garden.germinate("body", "norm", style="gated_gate")),
    ("train the other", lambda garden: garden.advance("body")),
    ("prune the other", lambda garden: garden.prune("body")),
    ("fossilize", fossilize),
    ("cool down", Garden.tick),
)


@every_optimizer
def test_survivors_keep_weights_and_state_through_every_change(kind: str) -> None:
    gardener, optimizer = make_gardener(kind)
    garden, batches = gardener.garden, make_batches()
    train(garden, optimizer, batches)
    for what, change in LIFE:
        before, weights = entries(optimizer), parameters_by_name(garden)
        result = change(garden)
        assert result is None or result, (what, result)
        left = {id(p) for p in garden.parameters()}
        survivors = [p for p in before if id(p) in left]
        assert len(survivors) >= 6, what
        for parameter in survivors:
            assert same(optimizer.state[parameter], before[parameter]), what
        now = parameters_by_name(garden)
        assert all(same(now[name], weights[name]) for name in now if name in weights), what
        assert set(optimizer.state) <= set(garden.parameters()), what
        assert covers(optimizer, garden), what
        train(garden, optimizer, batches[:2])
    assert [view.stage.name for view in garden.slots.values()] == [
        "FOSSILIZED",
        "EMBARGOED",
        "DORMANT",
    ]
    # A fossil goes on learning, with the state it had.
    assert all(p in optimizer.state for p in garden.slot_parameters("stem"))


@every_optimizer
def test_growth_does_not_change_what_the_optimizer_does_to_others(kind: str) -> None:
    """A seed that only germinates trains the host exactly as if it were not there."""
    grown, plain = make_gardener(kind), make_gardener(kind)
    batches = make_batches()
    for gardener, optimizer in (grown, plain):
        train(gardener.garden, optimizer, batches)
    assert grown[0].garden.germinate("body", "mlp_small")
    for gardener, optimizer in (grown, plain):
        train(gardener.garden, optimizer, batches)
    assert grown[0].garden.prune("body")
    for gardener, optimizer in (grown, plain):
        train(gardener.garden, optimizer, batches)
    assert same(
        parameters_by_name(grown[0].garden.model), parameters_by_name(plain[0].garden.model)
    )
    assert same(grown[0].carried.state_dict(), plain[0].carried.state_dict())  # type: ignore[union-attr]


@every_optimizer
@pytest.mark.parametrize("stage", ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"])
def test_a_removed_seed_leaves_nothing_behind(kind: str, stage: str) -> None:
    gardener, optimizer = make_gardener(kind)
    garden, batches = gardener.garden, make_batches()
    train(garden, optimizer, batches)
    host = members(optimizer)
    for style in ("linear_add", "gated_gate"):
        raise_seed(garden, "body", stage, style=style)
        train(garden, optimizer, batches)
        gone = [weakref.ref(p) for p in garden.slot_parameters("body")]
        assert len(gone) > 2
        assert garden.prune("body")
        assert members(optimizer) == host
        assert {id(p) for p in optimizer.state} == set(host)
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
        for _ in range(4):
            garden.tick()
        assert garden.slots["body"].stage.name == "DORMANT"


def test_a_gate_that_goes_when_the_style_changes_takes_its_state_along() -> None:
    gardener, optimizer = make_gardener("adam")
    garden = gardener.garden
    raise_seed(garden, "body", "HOLDING", style="gated_gate")
    train(garden, optimizer, make_batches())
    gate = list(garden.seedbed[1].gate.parameters())  # type: ignore[union-attr]
    seed = {p: frozen(dict(optimizer.state[p])) for p in garden.seedbed[1].seed.parameters()}  # type: ignore[union-attr]
    assert all(p in optimizer.state for p in gate)
    assert garden.set_alpha_target("body", 0.7, speed=0, style="linear_add")
    assert not any(p in optimizer.state for p in gate)
    assert all(same(optimizer.state[p], entry) for p, entry in seed.items())
    assert covers(optimizer, garden)


# ---------------------------------------------------------------------------------------- groups


def two_groups(garden: Garden) -> tuple[Gardener, Optimizer]:
    gardener = Gardener(garden, "wait", 100)
    groups = [
        {"params": list(garden.model.get_submodule("head").parameters()), "lr": 0.5},
        {"params": list(garden.model.get_submodule("stem").parameters()), "lr": 0.2},
        {"params": list(garden.model.get_submodule("body").parameters()), "lr": 0.1},
    ]
    return gardener, gardener.optimizer(SGD, groups, lr=1.0)


def group_of(optimizer: Optimizer, parameter: Tensor) -> int:
    places = [
        number
        for number, group in enumerate(optimizer.param_groups)
        if any(p is parameter for p in group["params"])
    ]
    assert len(places) == 1
    return places[0]


def test_new_parameters_join_the_group_of_the_module_behind_their_slot() -> None:
    garden = make_garden()
    _, optimizer = two_groups(garden)
    raise_seed(garden, "stem", "BLENDING", style="gated_gate")
    raise_seed(garden, "body", "BLENDING")
    # The neck has no parameters of its own: its seed joins the first group.
    raise_seed(garden, "neck", "TRAINING")
    found = {slot: {group_of(optimizer, p) for p in garden.slot_parameters(slot)} for slot in SLOTS}
    assert found == {"stem": {1}, "body": {2}, "neck": {0}}
    assert garden.prune("body")
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        2 + len(list(garden.slot_parameters("neck"))),
        2 + len(list(garden.slot_parameters("stem"))),
        2,
    ]


def by_decay(garden: Garden, *, flat_first: bool) -> list[dict[str, Any]]:
    """Weight decay for matrices alone, as most training scripts have it."""
    parameters = list(garden.parameters())
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    flat = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return [flat, matrices] if flat_first else [matrices, flat]


@pytest.mark.parametrize("flat_first", [False, True])
def test_norms_and_biases_of_seeds_follow_those_of_the_host(flat_first: bool) -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 100)
    optimizer = gardener.optimizer(AdamW, by_decay(garden, flat_first=flat_first), lr=0.1)
    raise_seed(garden, "stem", "BLENDING", style="gated_gate")
    # Behind the neck stands nothing with parameters.
    raise_seed(garden, "neck", "BLENDING")
    raise_seed(garden, "body", "TRAINING", blueprint="norm")
    for slot in SLOTS:
        for parameter in garden.slot_parameters(slot):
            group = optimizer.param_groups[group_of(optimizer, parameter)]
            assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0), slot
    assert covers(optimizer, garden)


def test_an_owner_who_decays_the_norms_of_a_part_decays_those_of_its_seeds() -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 100)
    whole = [
        {"params": list(garden.model.get_submodule(name).parameters()), "weight_decay": decay}
        for name, decay in (("stem", 0.1), ("body", 0.1), ("head", 0.0))
    ]
    optimizer = gardener.optimizer(AdamW, whole, lr=0.1)
    raise_seed(garden, "stem", "BLENDING")
    assert {group_of(optimizer, p) for p in garden.slot_parameters("stem")} == {0}


def test_a_slot_may_have_a_group_with_and_one_without_decay() -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 100)
    own = [{"params": [], "slot": "stem", "weight_decay": decay} for decay in (0.1, 0.0)]
    optimizer = gardener.optimizer(AdamW, [{"params": list(garden.parameters())}, *own], lr=0.1)
    raise_seed(garden, "stem", "BLENDING")
    found = {p.dim(): group_of(optimizer, p) for p in garden.slot_parameters("stem")}
    assert found == {2: 1, 1: 2}


def test_seeds_that_are_older_than_the_optimizer_join_it_once() -> None:
    garden = make_garden()
    raise_seed(garden, "stem", "BLENDING")
    whole = Gardener(garden, "wait", 10).optimizer(SGD, lr=0.1)
    assert covers(whole, garden)
    host_only = Gardener(garden, "wait", 10)
    optimizer = host_only.optimizer(SGD, list(garden.host_parameters()), lr=0.1)
    assert covers(optimizer, garden)
    assert garden.prune("stem")
    assert covers(whole, garden)
    assert covers(optimizer, garden)


def test_named_parameters_keep_their_names_in_step() -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 10)
    optimizer = gardener.optimizer(SGD, garden.named_parameters(), lr=0.1)

    def names_agree() -> bool:
        (group,) = optimizer.param_groups
        known = {id(p): name for name, p in garden.named_parameters()}
        return group["param_names"] == [known[id(p)] for p in group["params"]]

    assert names_agree()
    raise_seed(garden, "stem", "TRAINING")
    assert names_agree()
    train(garden, optimizer, make_batches())
    saved = frozen(gardener.state_dict())
    assert garden.prune("stem")
    assert names_agree()
    gardener.load_state_dict(saved)
    assert names_agree()
    assert covers(optimizer, garden)


@pytest.mark.parametrize("schedule", ["step", "lambda"])
def test_a_scheduler_made_before_growth_drives_new_parameters(schedule: str) -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 100)
    optimizer = gardener.optimizer(SGD, lr=0.4)
    scheduler = (
        StepLR(optimizer, 1, gamma=0.5)
        if schedule == "step"
        else LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    )
    batches = make_batches()
    raise_seed(garden, "stem", "BLENDING")
    for rate in (0.4, 0.2, 0.1):
        assert [group["lr"] for group in optimizer.param_groups] == [rate]
        before = {p: p.detach().clone() for p in garden.slot_parameters("stem")}
        train(garden, optimizer, batches[:1])
        for parameter, old in before.items():
            assert parameter.grad is not None
            assert torch.equal(parameter.detach(), old.add(parameter.grad, alpha=-rate))
        assert any(not torch.equal(p, old) for p, old in before.items())
        scheduler.step()


def test_parameters_outside_the_garden_survive() -> None:
    gardener = Gardener(make_garden(), "wait", 100)
    garden = gardener.garden
    own = nn.Parameter(torch.ones(2))
    groups = [{"params": [own], "lr": 0.3}, {"params": list(garden.parameters())}]
    optimizer = gardener.optimizer(SGD, groups, lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        x, y = make_batches(1)[0]
        (F.cross_entropy(garden(x), y) + own.square().sum()).backward()
        optimizer.step()

    step()
    raise_seed(garden, "stem", "BLENDING")
    step()
    momentum = optimizer.state[own]["momentum_buffer"].clone()
    saved = frozen(gardener.state_dict())
    assert garden.prune("stem")
    assert optimizer.param_groups[0]["params"] == [own]
    assert same(optimizer.state[own]["momentum_buffer"], momentum)
    step()
    gardener.load_state_dict(saved)
    assert optimizer.param_groups[0]["params"] == [own]
    assert same(optimizer.state[own]["momentum_buffer"], momentum)
    assert set(map(id, garden.parameters())) == set(members(optimizer)) - {id(own)}


# ------------------------------------------------------------------------- ways of taking a step


def test_gradient_accumulation_equals_the_whole_batch() -> None:
    """In double precision, half batches summed up are the whole batch to the last digits."""
    results = []
    for parts in (1, 2):
        garden = make_garden().double()
        gardener = Gardener(garden, "wait", 100)
        optimizer = gardener.optimizer(SGD, lr=0.1, momentum=0.9)
        for round_, (x, y) in enumerate(make_batches(6)):
            if round_ == 2:
                raise_seed(garden, "stem", "BLENDING")
            optimizer.zero_grad()
            for part_x, part_y in halves((x, y)) if parts == 2 else [(x, y)]:
                (F.cross_entropy(garden(part_x.double()), part_y) / parts).backward()
            optimizer.step()
        results.append(parameters_by_name(garden))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-12, atol=1e-12)


def test_gradient_scaling_changes_nothing_and_skips_what_overflows() -> None:
    """A scale that is a power of two is exact, so both runs agree bit for bit."""
    results = []
    for scaled in (False, True):
        gardener, optimizer = make_gardener("sgd")
        garden = gardener.garden
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for number, (x, y) in enumerate(make_batches(6)):
            if number == 2:
                raise_seed(garden, "stem", "BLENDING")
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(garden(x), y)).backward()
            scaler.unscale_(optimizer)
            clip_gradients(garden, 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append((parameters_by_name(garden), entries(optimizer)))
    assert same(results[0][0], results[1][0])
    assert same(list(results[0][1].values()), list(results[1][1].values()))

    # An overflow in a seed's gradient leaves everything as it was.
    before, state = parameters_by_name(garden), entries(optimizer)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(garden(x), y)).backward()
    next(garden.slot_parameters("stem")).grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert same(parameters_by_name(garden), before)
    assert same(list(entries(optimizer).values()), list(state.values()))
    assert scaler.get_scale() == 512.0


@every_optimizer
def test_zeroing_gradients_in_place_gives_the_same_training(kind: str) -> None:
    results = []
    for set_to_none in (True, False):
        gardener, optimizer = make_gardener(kind)
        garden = gardener.garden
        for number, (x, y) in enumerate(make_batches(8)):
            if number == 2:
                raise_seed(garden, "stem", "HOLDING")
            if number == 5:
                assert garden.set_alpha_target("stem", 0.5, speed=2)
            if number >= 5:
                garden.tick()
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(garden(x), y).backward()
            optimizer.step()
        assert garden.slots["stem"].alpha == 0.5
        results.append((parameters_by_name(garden), list(entries(optimizer).values())))
    assert same(results[0], results[1])


@every_optimizer
@pytest.mark.parametrize("way", ["prune", "lower target"])
def test_a_seed_that_is_blended_out_stands_still_and_keeps_its_state(kind: str, way: str) -> None:
    gardener, optimizer = make_gardener(kind)
    garden, batches = gardener.garden, make_batches()
    raise_seed(garden, "stem", "HOLDING", style="gated_gate")
    train(garden, optimizer, batches)
    if way == "prune":
        assert garden.prune("stem", speed=3)
    else:
        assert garden.set_alpha_target("stem", 0.5, speed=3)
    seed = list(garden.slot_parameters("stem"))
    weights = [p.detach().clone() for p in seed]
    state = [frozen(dict(optimizer.state[p])) for p in seed]
    host = parameters_by_name(garden.model)
    for _ in range(2):
        garden.tick()
        train(garden, optimizer, batches)
        assert all(same(p.detach(), old) for p, old in zip(seed, weights, strict=True))
        assert all(same(optimizer.state[p], old) for p, old in zip(seed, state, strict=True))
        assert covers(optimizer, garden)
    assert not any(same(host[name], p) for name, p in garden.model.named_parameters())
    garden.tick()
    train(garden, optimizer, batches)
    if way == "prune":
        assert not any(p in optimizer.state for p in seed)
    else:
        # There it holds and learns again, from the state it had.
        assert not any(same(p.detach(), old) for p, old in zip(seed, weights, strict=True))


def test_every_epoch_samples_the_first_step_and_then_at_a_stride() -> None:
    gardener, optimizer = make_gardener()
    garden = gardener.garden
    raise_seed(garden, "stem", "TRAINING")
    sampled: list[int] = []
    steps = 0
    measure = garden.measure_gradients

    def note() -> None:
        sampled.append(steps)  # the loop's variable below
        measure()

    garden.measure_gradients = note  # type: ignore[method-assign]
    for _ in range(2):
        for steps, batch in enumerate(make_batches(GRADIENT_STRIDE + 3)):  # noqa: B007
            train(garden, optimizer, [batch])
        gardener.step(make_evaluator())
    assert sampled == [0, GRADIENT_STRIDE] * 2
    assert garden.state.grad_norm[0, 0] > 0


# -------------------------------------------------------------------------------------- restoring


def through_disk(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    save_tree(folder / "state", state, kind="test", version=1)
    return load_tree(folder / "state", kind="test", version=1)[0]


@every_optimizer
@pytest.mark.parametrize("stage", ["none", "TRAINING", "BLENDING", "fading", "FOSSILIZED"])
@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "disk"])
def test_a_restored_gardener_trains_on_bit_for_bit(
    kind: str, stage: str, is_stored: bool, tmp_path: Path
) -> None:
    gardener, optimizer = make_gardener(kind)
    batches = make_batches(6)
    train(gardener.garden, optimizer, batches)
    if stage == "fading":
        raise_seed(gardener.garden, "stem", "HOLDING")
        train(gardener.garden, optimizer, batches)
        assert gardener.garden.prune("stem", speed=3)
    elif stage != "none":
        raise_seed(gardener.garden, "stem", stage)
    gardener.step(make_evaluator())
    train(gardener.garden, optimizer, batches)

    state = gardener.state_dict()
    state = through_disk(state, tmp_path) if is_stored else frozen(state)
    fresh, fresh_optimizer = make_gardener(kind, seed=99)
    fresh.load_state_dict(state)
    assert covers(fresh_optimizer, fresh.garden)

    for number in range(4):
        losses = []
        for one, its_optimizer in ((gardener, optimizer), (fresh, fresh_optimizer)):
            if number == 1 and stage == "none":
                raise_seed(one.garden, "body", "BLENDING")
            if number == 1 and stage in ("TRAINING", "BLENDING"):
                assert one.garden.prune("stem")
            one.garden.tick()
            losses.append(train(one.garden, its_optimizer, batches))
        assert losses[0] == losses[1]
        assert same(gardener.garden.state_dict(), fresh.garden.state_dict())
        assert gardener.carried is not None
        assert fresh.carried is not None
        assert same(gardener.carried.state_dict(), fresh.carried.state_dict())


@every_optimizer
def test_the_state_of_the_optimizer_itself_is_restored_by_name(kind: str, tmp_path: Path) -> None:
    """A trainer saves `optimizer.state_dict()`, and makes the optimizer of a grown network."""
    gardener, optimizer = make_gardener(kind)
    raise_seed(gardener.garden, "body", "BLENDING")
    raise_seed(gardener.garden, "stem", "BLENDING")
    train(gardener.garden, optimizer, make_batches(6))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    fresh = Gardener(make_garden(99), "wait", 100)
    fresh.garden.load_state_dict(gardener.garden.state_dict())
    factory, options = OPTIMIZERS[kind]
    again = fresh.optimizer(factory, **options)
    # The seeds came in another order than they stand in the network, and no shape would tell.
    assert again.state_dict()[NAMES] != optimizer.state_dict()[NAMES]
    assert [p.shape for p in parameters(again)] == [p.shape for p in parameters(optimizer)]
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert again.state_dict()[NAMES] == optimizer.state_dict()[NAMES]
    assert gardener.carried is not None
    assert fresh.carried is not None
    assert same(gardener.carried.state_dict(), fresh.carried.state_dict())
    for one, its in ((gardener, optimizer), (fresh, again)):
        train(one.garden, its, make_batches(3, seed=8))
    assert same(gardener.garden.state_dict(), fresh.garden.state_dict())


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_a_state_without_names_is_taken_only_where_there_are_no_seeds() -> None:
    gardener, optimizer = make_gardener("adamw")
    train(gardener.garden, optimizer, make_batches(2))
    plain = AdamW(make_garden().parameters(), lr=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    raise_seed(gardener.garden, "stem", "TRAINING")
    with pytest.raises(CheckpointError, match="does not name its parameters, so those of seeds"):
        optimizer.load_state_dict(plain.state_dict())
    named = optimizer.state_dict()
    _, un_grown = make_gardener("adamw")
    with pytest.raises(CheckpointError, match="knows parameters this network lacks"):
        un_grown.load_state_dict(named)


def test_a_restored_scheduler_drives_the_restored_groups() -> None:
    runs = []
    for _ in range(2):
        gardener = Gardener(make_garden(), "wait", 100)
        optimizer = gardener.optimizer(SGD, lr=0.4, momentum=0.9)
        runs.append((gardener, optimizer, LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))))
    (gardener, optimizer, scheduler), (fresh, fresh_optimizer, fresh_scheduler) = runs
    batches = make_batches()
    raise_seed(gardener.garden, "stem", "BLENDING")
    for _ in range(3):
        train(gardener.garden, optimizer, batches)
        scheduler.step()
    fresh.load_state_dict(frozen(gardener.state_dict()))
    fresh_scheduler.load_state_dict(frozen(scheduler.state_dict()))
    assert fresh_optimizer.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        assert train(gardener.garden, optimizer, batches) == train(
            fresh.garden, fresh_optimizer, batches
        )
        scheduler.step()
        fresh_scheduler.step()
    assert same(gardener.garden.state_dict(), fresh.garden.state_dict())


def test_restoring_in_the_middle_of_an_epoch_starts_the_epoch_again() -> None:
    """The strided gradient samples start anew, so that the epoch repeats exactly."""
    gardener, optimizer = make_gardener()
    garden, batches = gardener.garden, make_batches(GRADIENT_STRIDE + 2)
    raise_seed(garden, "stem", "TRAINING")
    saved = frozen(gardener.state_dict())
    states = []
    for false_start in (0, 3):
        train(garden, optimizer, batches[:false_start])
        gardener.load_state_dict(frozen(saved))
        train(garden, optimizer, batches)
        gardener.step(make_evaluator())
        states.append(frozen(garden.state.state_dict()))
        gardener.load_state_dict(frozen(saved))
    assert same(states[0], states[1])


def test_restoring_refuses_what_does_not_match() -> None:
    gardener, optimizer = make_gardener("sgd")
    train(gardener.garden, optimizer, make_batches())
    raise_seed(gardener.garden, "stem", "TRAINING")
    assert gardener.carried is not None
    saved = frozen(gardener.carried.state_dict())

    other, _ = make_gardener("adam")
    with pytest.raises(CheckpointError, match="saved optimizer is a SGD, this one a Adam"):
        other.carried.load_state_dict(saved)  # type: ignore[union-attr]

    grouped, _ = two_groups(make_garden())
    with pytest.raises(CheckpointError, match=r"1 parameter groups, this one 3"):
        grouped.carried.load_state_dict(saved)  # type: ignore[union-attr]

    bare, _ = make_gardener("sgd")
    with pytest.raises(CheckpointError, match=r"parameters this network lacks: seedbed"):
        bare.carried.load_state_dict(saved)  # type: ignore[union-attr]


def test_restoring_refuses_to_drop_parameters() -> None:
    gardener, _ = make_gardener("sgd")
    assert gardener.carried is not None
    saved = frozen(gardener.carried.state_dict())
    other = Gardener(make_garden(), "wait", 10)
    own = nn.Parameter(torch.ones(2))
    optimizer = other.optimizer(SGD, [*other.garden.parameters(), own], lr=0.1)
    with pytest.raises(CheckpointError, match="lacks parameters this one has"):
        other.carried.load_state_dict(saved)  # type: ignore[union-attr]
    assert id(own) in members(optimizer)
