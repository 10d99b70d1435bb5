from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import CarriedOptimizer
from esper.kasmina.training import Objective, SchedulerFactory, Trainee, per_sample_classification
from esper.leyline.errors import UsageError
from esper.utils.randomness import drawing
from tests.plots import (
    EAGER,
    make_batches,
    make_garden,
    parameters_by_name,
    raise_seed,
    record_epoch,
    same,
    train,
)

FACTORY = partial(SGD, lr=0.1, momentum=0.9)


def _sequential(optimizer: Optimizer) -> LRScheduler:
    warm = LambdaLR(optimizer, lambda epoch: 0.1 * (1 + epoch))
    return SequentialLR(optimizer, [warm, ExponentialLR(optimizer, 0.5)], milestones=[2])


SCHEDULES: dict[str, SchedulerFactory] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.1 * (1 + epoch)),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=20),
    "sequential": _sequential,
}


def make_trainee(
    garden: Garden | None = None,
    *,
    factory: Any = FACTORY,
    objective: Objective = per_sample_classification,
    max_grad_norm: float = 0.0,
    scheduler: SchedulerFactory | None = None,
) -> Trainee:
    garden = garden or make_garden()
    carried = CarriedOptimizer(garden, factory(list(garden.parameters())))
    return Trainee(garden, carried, objective, max_grad_norm=max_grad_norm, scheduler=scheduler)


def run_epochs(trainee: Trainee, epochs: int) -> list[float | None]:
    losses = []
    for _ in range(epochs):
        trainee.start_epoch()
        for x, y in make_batches():
            trainee.train_batch(x, y)
        losses.append(trainee.finish_epoch())
    return losses


def test_a_step_is_what_a_plain_loop_does() -> None:
    trainee, garden = make_trainee(), make_garden()
    optimizer = FACTORY(list(garden.parameters()))
    losses = train(garden, optimizer, make_batches())
    assert run_epochs(trainee, 1) == [pytest.approx(sum(losses) / len(losses))]
    assert same(parameters_by_name(trainee.garden), parameters_by_name(garden))
    assert trainee.finish_epoch() is None


def test_host_and_seeds_are_clipped_apart() -> None:
    trainee = make_trainee(factory=partial(SGD, lr=1.0), max_grad_norm=0.01)
    garden = trainee.garden
    raise_seed(garden, "stem", "BLENDING")
    before = parameters_by_name(garden)
    trainee.train_batch(*make_batches(1)[0])
    moved = {name: p - before[name] for name, p in parameters_by_name(garden).items()}
    for prefix in ("model.", "seedbed.slots.0."):
        parts = [change.norm() for name, change in moved.items() if name.startswith(prefix)]
        assert float(torch.stack(parts).norm()) == pytest.approx(0.01, rel=1e-3)


def test_gradients_are_sampled_before_they_are_clipped() -> None:
    norms = []
    for limit in (0.0, 1e-3):
        trainee = make_trainee(max_grad_norm=limit)
        raise_seed(trainee.garden, "stem", "TRAINING")
        run_epochs(trainee, 1)
        record_epoch(trainee.garden, 50.0)
        norms.append(float(trainee.garden.state.grad_norm[0, 0]))
    assert norms[0] > 1e-2
    # Four steps with other weights: the first sample, which counts, is the same.
    assert norms[0] == norms[1]


def test_a_loss_that_is_not_finite_is_returned_for_the_governor_to_judge() -> None:
    def broken(outputs: Tensor, y: Tensor) -> tuple[Tensor, None]:
        return outputs.sum(1) * math.nan, None

    trainee = make_trainee(objective=broken)
    trainee.start_epoch()
    trainee.train_batch(*make_batches(1)[0])
    loss = trainee.finish_epoch()
    assert loss is not None
    assert math.isnan(loss)


@pytest.mark.parametrize(
    "returned",
    [
        lambda outputs, y: torch.nn.functional.cross_entropy(outputs, y),
        lambda outputs, y: torch.nn.functional.cross_entropy(outputs, y, reduction="none"),
    ],
    ids=["mean", "per sample without correctness"],
)
def test_a_plain_loss_function_is_refused_before_it_trains(returned: Any) -> None:
    trainee = make_trainee(objective=returned)
    before = parameters_by_name(trainee.garden)
    with pytest.raises(UsageError, match=r"the loss function must return \(loss\[B\], correct"):
        trainee.train_batch(*make_batches(1)[0])
    assert same(parameters_by_name(trainee.garden), before)


def test_the_schedule_is_stepped_once_per_epoch() -> None:
    trainee = make_trainee(scheduler=SCHEDULES["exponential"])
    rates = []
    for _ in range(3):
        rates.append(trainee.carried.optimizer.param_groups[0]["lr"])
        run_epochs(trainee, 1)
    assert rates == [0.1, 0.05, 0.025]


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    with pytest.raises(UsageError, match="ReduceLROnPlateau waits for a metric"):
        make_trainee(scheduler=ReduceLROnPlateau)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("factory", [FACTORY, partial(Adam, lr=0.01)], ids=["sgd", "adam"])
def test_a_fork_trains_on_exactly_like_its_original(schedule: str | None, factory: Any) -> None:
    trainee = make_trainee(
        factory=factory,
        max_grad_norm=1.0,
        scheduler=None if schedule is None else SCHEDULES[schedule],
    )
    run_epochs(trainee, 3)
    fork = trainee.fork(lambda garden: factory(list(garden.parameters())))
    assert not {id(p) for p in trainee.garden.parameters()} & set(map(id, fork.garden.parameters()))
    for _ in range(3):
        groups = (trainee.carried.optimizer.param_groups, fork.carried.optimizer.param_groups)
        assert groups[0][0]["lr"] == groups[1][0]["lr"]
        assert run_epochs(trainee, 1) == run_epochs(fork, 1)
    assert same(trainee.state_dict(), fork.state_dict())


def test_a_fork_goes_its_own_way() -> None:
    trainee = make_trainee()
    run_epochs(trainee, 1)
    fork = trainee.fork(lambda garden: FACTORY(list(garden.parameters())))
    before = parameters_by_name(fork.garden)
    raise_seed(trainee.garden, "stem", "BLENDING")
    run_epochs(trainee, 2)
    assert same(parameters_by_name(fork.garden), before)
    assert fork.garden.slots["stem"].stage.name == "DORMANT"
    assert [len(group["params"]) for group in fork.carried.optimizer.param_groups] == [6]


@pytest.mark.parametrize("mode", ["straight_through", "shadow"])
@pytest.mark.parametrize("stage", ["TRAINING", "BLENDING"])
def test_a_state_restores_a_trainee(mode: Any, stage: str) -> None:
    config = EAGER.replace(training_mode=mode)
    trainee = make_trainee(make_garden(config=config), scheduler=SCHEDULES["lambda"])
    raise_seed(trainee.garden, "stem", "TRAINING")
    run_epochs(trainee, 1)
    if stage == "BLENDING":
        assert trainee.garden.advance("stem")
        trainee.garden.tick()
    run_epochs(trainee, 1)
    state = trainee.fork(lambda garden: FACTORY(list(garden.parameters()))).state_dict()
    fresh = make_trainee(make_garden(seed=9, config=config), scheduler=SCHEDULES["lambda"])
    fresh.load_state_dict(state)
    assert run_epochs(trainee, 2) == run_epochs(fresh, 2)
    assert same(trainee.state_dict(), fresh.state_dict())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_draws_depend_on_their_keys_and_leave_the_global_numbers_alone(device: str) -> None:
    torch.manual_seed(3)
    untouched = torch.rand(2, device=device)
    torch.manual_seed(3)
    drawn = {}
    for keys in ((1, "a"), (2, "a"), (1, "a")):
        with drawing(torch.device(device), *keys):
            numbers = torch.rand(4, device=device)
        assert torch.equal(drawn.setdefault(keys, numbers), numbers)
    assert not torch.equal(drawn[1, "a"], drawn[2, "a"])
    with pytest.raises(KeyError), drawing(torch.device(device), 1, "a"):
        raise KeyError
    assert torch.equal(torch.rand(2, device=device), untouched)
