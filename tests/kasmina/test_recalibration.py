from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from esper.kasmina.evaluation import BatchEvaluator, evaluate_contributions, moving_norms
from esper.kasmina.garden import Garden
from esper.kasmina.recalibration import (
    RecalibratedEvaluator,
    SpreadSample,
    first_samples,
    fitting_evaluator,
    read_statistics,
    recalibrate,
)
from esper.kasmina.training import per_sample_classification
from tests.plots import EAGER, TinyConv, make_evaluator, make_garden, raise_seed

torch.manual_seed(0)
BATCHES = [torch.randn(16, 1, 8, 8) * (1 + number) + number for number in range(4)]


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(256, 6),
        nn.BatchNorm1d(6),
    )


def statistics(model: nn.Module) -> list[Tensor]:
    return read_statistics([m for m in model.modules() if hasattr(m, "running_mean")])


def test_statistics_are_those_of_pytorchs_own_tool() -> None:
    model = make_model().train()
    expected = copy.deepcopy(model)
    update_bn(BATCHES, expected)
    assert recalibrate(model, BATCHES, moving_norms(model)) == 64
    torch.testing.assert_close(statistics(model), statistics(expected), rtol=1e-5, atol=1e-6)


def test_batches_count_by_their_size() -> None:
    # In equal halves of [24] and [8] a small batch would count three times too much.
    model = nn.BatchNorm1d(2).train()
    recalibrate(model, [torch.ones(24, 2), torch.zeros(8, 2)], [model])
    torch.testing.assert_close(model.running_mean, torch.full((2,), 0.75))


def test_nothing_else_changes() -> None:
    model = make_model(dropout=0.5).train()
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    recalibrate(model, BATCHES, moving_norms(model))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert [module.momentum for module in (model[1], model[6])] == [0.1, 0.1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != ("running" in name), name


def test_dropout_is_off_as_in_an_evaluation() -> None:
    plain, noisy = make_model().train(), make_model(dropout=0.9).train()
    for model in (plain, noisy):
        recalibrate(model, BATCHES, moving_norms(model))
    assert all(map(torch.equal, statistics(plain), statistics(noisy)))


def test_what_is_not_finite_does_not_stay() -> None:
    model = make_model().train()
    model[1].running_mean.fill_(torch.nan)
    recalibrate(model, BATCHES, moving_norms(model))
    assert all(bool(torch.isfinite(each).all()) for each in statistics(model))


def test_a_layer_that_no_batch_reaches_keeps_what_it_has() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)]).train()
    model.forward = model[0].forward  # type: ignore[method-assign, assignment]
    model[1].running_mean.fill_(3.0)  # type: ignore[operator, union-attr]
    recalibrate(model, [torch.ones(4, 2)], moving_norms(model))
    assert model[1].running_mean.tolist() == [3.0, 3.0]  # type: ignore[operator, union-attr]


def test_a_layer_that_is_used_twice_averages_both_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            other: Tensor = self.norm(x + 2)
            return other + self.norm(x)

    model = Twice().train()
    recalibrate(model, [torch.ones(4, 1), torch.ones(4, 1)], moving_norms(model))
    torch.testing.assert_close(model.norm.running_mean, torch.tensor([2.0]))


def test_a_compiled_model_runs_as_it_is_written() -> None:
    model = TinyConv(norm=True).train()
    expected = copy.deepcopy(model)
    recalibrate(expected, BATCHES, moving_norms(expected))
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model.compile(backend=backend)
    recalibrate(model, BATCHES, moving_norms(model))
    assert not compiled
    assert all(map(torch.equal, statistics(model), statistics(expected)))
    model(BATCHES[0])
    assert compiled


class Frozen(nn.Sequential):
    """Keeps its first normalisation as it is, as for fine-tuning."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].training = False
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_a_layer_that_its_owner_keeps_in_eval_mode_is_left_alone(mode: bool) -> None:
    model = Frozen(*make_model()).train(mode)
    assert moving_norms(model) == [model[6]]
    assert [module.training for module in (model, model[1], model[6])] == [mode, False, mode]
    untracked = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))
    assert moving_norms(untracked) == []
    assert recalibrate(untracked, [torch.ones(4, 2)], []) == 0


@pytest.mark.parametrize(
    ("count", "most", "kept"),
    [
        (3, 4, [0, 1, 2]),
        (5, 4, [0, 2, 4]),
        (9, 4, [0, 4, 8]),
        (8, 3, [0, 4]),
        (100, 4, [0, 32, 64, 96]),
        (7, 0, []),
    ],
)
def test_a_sample_is_spread_over_the_whole_stream(count: int, most: int, kept: list[int]) -> None:
    for size in (1, 16):
        sample = SpreadSample(most * size)
        for number in range(count):
            sample.add(torch.full((size, 2), number))
        assert [int(batch[0, 0]) for batch in sample.batches] == kept


def test_what_a_sample_holds_is_bounded_by_samples_of_whatever_batches() -> None:
    sizes = [200, 8, 64, 64, 64, 1, 300, 8]
    for most in (400, 64):
        sample = SpreadSample(most)
        for size in sizes:
            sample.add({"x": torch.zeros(size, 2), "scale": torch.ones(())})
        found = [len(batch["x"]) for batch in sample.batches]
        assert sum(found) <= most or len(found) == 1, found
    whole = SpreadSample(sum(sizes))
    for size in sizes:
        whole.add((torch.zeros(size, 2), torch.zeros(size)))
    assert len(whole.batches) == len(sizes), "what fits is kept whole"


@pytest.mark.parametrize(("most", "read"), [(1, 1), (16, 1), (31, 1), (32, 2), (63, 3), (64, 4)])
def test_no_batch_is_read_beyond_the_samples_asked_for(most: int, read: int) -> None:
    stream = iter(BATCHES)
    assert len(list(first_samples(stream, most))) == read
    assert len(list(stream)) == len(BATCHES) - read


# ------------------------------------------------------------------------------------- ablations


def grown_garden() -> Garden:
    torch.manual_seed(0)
    garden = Garden(TinyConv(norm=True), ["first"], BATCHES[0], config=EAGER)
    garden.germinate("first", "conv_heavy", tempo=1)
    for _ in range(2):
        garden.advance("first")
        garden.tick()
    with torch.no_grad():
        for parameter in garden.slot_parameters("first"):
            parameter.add_(torch.randn_like(parameter))
    return garden.train()


def test_an_ablation_is_measured_with_statistics_of_its_own_and_puts_them_back() -> None:
    garden = grown_garden()
    norms = moving_norms(garden)
    recalibrate(garden, BATCHES, norms)
    own = read_statistics(norms)
    seen: list[list[Tensor]] = []

    class Looking:
        def measure(self, garden: Garden, configurations: Tensor) -> Any:
            seen.append(read_statistics(norms))
            return torch.zeros(len(configurations), 3), None

    plan = torch.tensor([[True], [False]])
    loss, correct = RecalibratedEvaluator(Looking(), BATCHES, norms).measure(garden, plan)
    assert (loss.shape, correct) == ((2, 3), None)
    assert all(map(torch.equal, read_statistics(norms), own))
    assert all(map(torch.equal, seen[0], own))
    alone = copy.deepcopy(garden.model)
    for module in alone.modules():
        module._forward_hooks.clear()
    recalibrate(alone, BATCHES, moving_norms(alone))
    torch.testing.assert_close(seen[1], statistics(alone), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen[1][0], own[0])


def test_contributions_are_those_of_networks_with_fitting_statistics() -> None:
    garden = grown_garden()
    recalibrate(garden, BATCHES, moving_norms(garden))
    labelled = [(batch, torch.arange(16) % 10) for batch in BATCHES]
    plain = BatchEvaluator(labelled, per_sample_classification)
    fitting = fitting_evaluator(plain, garden, BATCHES)
    assert isinstance(fitting, RecalibratedEvaluator)
    found = evaluate_contributions(garden, fitting)
    # The same by hand: the garden without its seed, with statistics taken for that.
    whole = plain.measure(garden, torch.tensor([[True]]))[1]
    assert whole is not None
    with garden.seedbed.configured(torch.tensor([[False]]), None):
        recalibrate(garden, BATCHES, moving_norms(garden))
    without = plain.measure(garden, torch.tensor([[False]]))[1]
    assert without is not None
    expected = 100 * float((whole - without).double().mean())
    assert found.leave_one_out["first"].value == pytest.approx(expected)


def test_without_statistics_or_batches_nothing_is_different() -> None:
    evaluator = make_evaluator()
    garden = make_garden()
    raise_seed(garden, "stem")
    assert fitting_evaluator(evaluator, garden, BATCHES) is evaluator
    assert fitting_evaluator(evaluator, grown_garden(), []) is evaluator
