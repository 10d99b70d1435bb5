from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import evaluation
from esper.kasmina.ablation import plan_ablations
from esper.kasmina.evaluation import (
    BatchEvaluator,
    Evaluator,
    FunctionEvaluator,
    as_evaluator,
    evaluate_contributions,
)
from esper.kasmina.garden import Garden
from esper.leyline.errors import NonFiniteError, UsageError
from esper.tasks.objective import per_sample_classification, per_sample_regression
from tests.plots import (
    EAGER,
    SLOTS,
    Batch,
    TinyConv,
    make_batches,
    make_evaluator,
    make_garden,
    raise_seed,
    shake,
)

STYLES = ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")


def blended_garden(seeds: int, style: str) -> Garden:
    """A garden with this many seeds, each at an amplitude of its own and with random weights."""
    garden = make_garden()
    for number, slot in enumerate(SLOTS[:seeds]):
        raise_seed(garden, slot, style=style, ticks=0)
        for _ in range(2 - number % 2):
            garden.tick()
    shake(garden)
    return garden


def make_function(batches: list[Batch]) -> Any:
    def evaluate(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        results = [per_sample_classification(model(x), y) for x, y in batches]
        losses, corrects = zip(*results, strict=True)
        return torch.cat(losses), torch.cat(corrects)

    return evaluate


def measured_by_hand(garden: Garden, configurations: Tensor, batches: list[Batch]) -> Any:
    """Set every amplitude by hand, run the network, and put the amplitude back."""
    evaluate = make_function(batches)
    garden.eval()
    losses, corrects = [], []
    with torch.no_grad():
        for configuration in configurations.tolist():
            before = [slot.alpha.clone() for slot in garden.seedbed]
            for slot, on in zip(garden.seedbed, configuration, strict=True):
                slot.alpha.mul_(float(on))
            loss, correct = evaluate(garden)
            losses.append(loss)
            corrects.append(correct)
            for slot, alpha in zip(garden.seedbed, before, strict=True):
                slot.alpha.copy_(alpha)
    return torch.stack(losses), torch.stack(corrects)


# ------------------------------------------------------------------------------- the three agree


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_fused_and_separate_ablations_equal_those_made_by_hand(seeds: int, style: str) -> None:
    garden = blended_garden(seeds, style)
    batches = make_batches(3, 24, seed=9)
    configurations = plan_ablations([index < seeds for index in range(len(SLOTS))])
    assert len(configurations) == 2**seeds
    expected, right = measured_by_hand(garden, configurations, batches)
    # Every seed matters, or the comparison would show nothing.
    assert len({tuple(row) for row in expected.tolist()}) == 2**seeds

    fused, fused_right = BatchEvaluator(batches, per_sample_classification).measure(
        garden, configurations
    )
    separate, separate_right = FunctionEvaluator(make_function(batches)).measure(
        garden, configurations
    )
    assert fused.shape == (2**seeds, 72)
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(separate, expected, rtol=1e-5, atol=1e-6)
    assert fused_right is not None
    assert separate_right is not None
    assert torch.equal(fused_right, right)
    assert torch.equal(separate_right, right)


def test_images_agree_as_well() -> None:
    torch.manual_seed(0)
    garden = Garden(TinyConv(), ["first", "second"], torch.zeros(2, 1, 8, 8), config=EAGER)
    raise_seed(garden, "first", blueprint="conv_light", style="gated_gate", ticks=2)
    raise_seed(garden, "second", blueprint="attention", style="linear_multiply", ticks=2)
    shake(garden)
    batches = [(torch.randn(20, 1, 8, 8), torch.randint(10, (20,))) for _ in range(2)]
    configurations = plan_ablations([True, True])
    expected, _ = measured_by_hand(garden, configurations, batches)
    fused, _ = BatchEvaluator(batches, per_sample_classification).measure(garden, configurations)
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-6)


def test_contributions_are_differences_of_what_was_measured() -> None:
    garden = blended_garden(2, "linear_add")
    batches = make_batches(2, 32, seed=9)
    result = evaluate_contributions(garden, make_evaluator(batches))
    again = evaluate_contributions(garden, make_function(batches))
    assert result.leave_one_out.keys() == {"stem", "body"}
    for name, estimate in result.leave_one_out.items():
        assert again.leave_one_out[name].value == pytest.approx(estimate.value)
        assert again.leave_one_out[name].se == pytest.approx(estimate.se)

    configurations = torch.tensor([[True, True, True], [False, True, True]])
    _, right = measured_by_hand(garden, configurations, batches)
    differences = 100 * (right[0] - right[1]).double()
    assert result.leave_one_out["stem"].value == pytest.approx(float(differences.mean()))
    assert result.leave_one_out["stem"].se == pytest.approx(float(differences.std()) / 64**0.5)
    # Nothing is written down in the garden.
    assert garden.slots["stem"].contribution is None


def test_fossils_take_part_only_when_asked_for() -> None:
    garden = make_garden()
    raise_seed(garden, "stem", "FOSSILIZED")
    raise_seed(garden, "body", "BLENDING")
    shake(garden)
    evaluator = make_evaluator()
    assert evaluate_contributions(garden, evaluator).leave_one_out.keys() == {"stem", "body"}
    alone = evaluate_contributions(garden, evaluator, fossils=False)
    assert alone.leave_one_out.keys() == {"body"}
    assert alone.all_off == alone.leave_one_out["body"]


def test_an_empty_garden_contributes_nothing() -> None:
    result = evaluate_contributions(make_garden(), make_evaluator())
    assert result.leave_one_out == {}
    assert result.all_off.value == 0
    assert 0 < result.score.value < 100


@pytest.mark.parametrize("limit", [1, 40, 100, 10**9])
def test_the_size_of_a_pass_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    garden = blended_garden(3, "gated_gate")
    configurations = plan_ablations([True, True, True])
    evaluator = make_evaluator(make_batches(2, 24, seed=9))
    loss, correct = evaluator.measure(garden, configurations)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    garden.model.register_forward_hook(count)
    monkeypatch.setattr(evaluation, "_FUSED_SAMPLES_CPU", limit)
    again, right = evaluator.measure(garden, configurations)
    assert passes == 2 * {1: 8, 40: 8, 100: 2, 10**9: 1}[limit]
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    assert correct is not None
    assert right is not None
    assert torch.equal(right, correct)


def test_batches_may_differ_in_size() -> None:
    garden = blended_garden(2, "linear_add")
    x, y = make_batches(1, 50, seed=9)[0]
    configurations = plan_ablations([True, True, False])
    whole, _ = make_evaluator([(x, y)]).measure(garden, configurations)
    parts = [(x[:33], y[:33]), (x[33:49], y[33:49]), (x[49:], y[49:])]
    cut, _ = make_evaluator(parts).measure(garden, configurations)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------- inputs of other kinds


class Mixer(nn.Module):
    """Takes tokens, a table that is the same for every sample, a number and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, table: Tensor, scale: float, kind: str) -> Tensor:
        assert kind == "plain"
        hidden = self.stem(x @ table) * scale
        scores: Tensor = self.head(torch.tanh(hidden))
        return scores


@pytest.mark.parametrize("shape", [dict, tuple, list])
def test_inputs_may_be_tuples_and_dicts_with_more_than_tensors(shape: type) -> None:
    def pack(x: Tensor) -> Any:
        values = {"x": x, "table": torch.eye(4), "scale": 2.0, "kind": "plain"}
        return values if shape is dict else shape(values.values())

    torch.manual_seed(0)
    batches = make_batches(2, 16, seed=9)
    packed = [(pack(x), y) for x, y in batches]
    garden = Garden(Mixer(), ["stem"], packed[0][0], config=EAGER)
    raise_seed(garden, "stem", style="linear_add", ticks=2)
    shake(garden)
    configurations = plan_ablations([True])
    fused, _ = BatchEvaluator(packed, per_sample_classification).measure(garden, configurations)

    def evaluate(model: nn.Module) -> tuple[Tensor, None]:
        losses = [
            per_sample_classification(model(x, torch.eye(4), 2.0, "plain"), y)[0]
            for x, y in batches
        ]
        return torch.cat(losses), None

    separate, _ = FunctionEvaluator(evaluate).measure(garden, configurations)
    torch.testing.assert_close(fused, separate, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fused[0], fused[1])


@pytest.mark.parametrize("targets", ["none", "tuple", "dict"])
def test_targets_may_be_whatever_the_loss_understands(targets: str) -> None:
    def spread(outputs: Tensor, target: Any) -> tuple[Tensor, None]:
        """A loss without labels: how far the scores of a sample lie apart."""
        weight = {"none": lambda: 1.0, "tuple": lambda: target[1], "dict": lambda: target["w"]}
        return outputs.std(1) * weight[targets](), None

    garden = blended_garden(2, "linear_add")
    batches = []
    for x, y in make_batches(2, 16, seed=9):
        w = torch.ones(len(y))
        batches.append((x, {"none": None, "tuple": (y, w), "dict": {"y": y, "w": w}}[targets]))
    result = evaluate_contributions(garden, BatchEvaluator(batches, spread))
    assert result.leave_one_out.keys() == {"stem", "body"}
    with torch.no_grad():
        expected = torch.cat([garden.eval()(x).std(1) for x, _ in batches]).mean()
    assert result.score.value == pytest.approx(-float(expected), rel=1e-5)


def test_regression_is_scored_by_the_negative_loss_in_its_own_unit() -> None:
    garden = blended_garden(1, "linear_add")
    batches = [(x, torch.randn(len(y), 3)) for x, y in make_batches(2, 16, seed=9)]
    result = evaluate_contributions(garden, BatchEvaluator(batches, per_sample_regression))

    def mean_loss() -> float:
        with torch.no_grad():
            losses = [per_sample_regression(garden.eval()(x), y)[0] for x, y in batches]
        return float(torch.cat(losses).double().mean())

    with_seed = mean_loss()
    garden.seedbed[0].alpha.zero_()
    without = mean_loss()
    assert result.score.value == pytest.approx(-with_seed, rel=1e-6)
    assert result.leave_one_out["stem"].value == pytest.approx(without - with_seed, rel=1e-4)


# ----------------------------------------------------------------------------------- being polite


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_is_put_back_into_its_own_mode(fails: bool) -> None:
    garden = blended_garden(1, "linear_add")
    garden.train()
    garden.model.get_submodule("body").eval()
    modes = {name: module.training for name, module in garden.named_modules()}
    assert len(set(modes.values())) == 2
    seen = set()

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, None]:
        assert not outputs.requires_grad
        seen.update(module.training for module in garden.modules())
        loss = outputs.sum(1) if not fails else torch.full((len(outputs),), torch.nan)
        return loss, None

    def evaluate(model: nn.Module) -> tuple[Tensor, None]:
        return objective(model(make_batches(1)[0][0]), torch.zeros(1))

    for evaluator in (BatchEvaluator(make_batches(1), objective), evaluate):
        if fails:
            with pytest.raises(NonFiniteError):
                evaluate_contributions(garden, evaluator)
        else:
            evaluate_contributions(garden, evaluator)
        assert {name: module.training for name, module in garden.named_modules()} == modes
        assert all(slot.sample_alphas is None for slot in garden.seedbed)
    assert seen == {False}


def test_anything_with_a_measure_method_is_an_evaluator() -> None:
    class Fixed:
        def measure(self, garden: Garden, configurations: Tensor) -> tuple[Tensor, None]:
            return torch.ones(len(configurations), 5), None

        def __call__(self) -> None:
            raise AssertionError("not this")

    evaluator: Evaluator = Fixed()
    assert as_evaluator(evaluator) is evaluator
    assert evaluate_contributions(make_garden(), evaluator).score.value == -1
    own = make_evaluator()
    assert as_evaluator(own) is own


def test_what_cannot_evaluate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"evaluate must be a function .* got None"):
        as_evaluator(None)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- refusals


def test_an_empty_validation_set_is_refused() -> None:
    garden = make_garden()
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    for batches in ([], [empty]):
        with pytest.raises(UsageError, match="the validation set is empty; give it at least one"):
            evaluate_contributions(garden, BatchEvaluator(batches, per_sample_classification))
    with pytest.raises(UsageError, match="the validation set is empty"):
        evaluate_contributions(garden, lambda model: (torch.zeros(0), None))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(3), r"evaluate\(model\) must return \(loss\[M\], correct\[M\] or None\)"),
        (None, r"must return \(loss\[M\], correct\[M\] or None\)"),
        ((torch.ones(3), None, None), r"must return \(loss\[M\], correct\[M\] or None\)"),
        ((torch.ones(3, 1), None), r"one loss per validation sample, \[M\], got \[3, 1\]"),
        ((torch.tensor(1.0), None), r"one loss per validation sample, \[M\], got \[\]"),
        ((1.0, None), r"one loss per validation sample, \[M\], got float"),
        ((torch.ones(3), torch.ones(4)), r"3 losses but correctness of shape \[4\]"),
        ((torch.ones(3), 0.5), r"3 losses but correctness of type float"),
    ],
)
def test_results_of_the_wrong_shape_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_contributions(make_garden(), lambda model: returned)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(16), r"the loss function must return \(loss\[B\], correct\[B\] or None\)"),
        (torch.tensor(1.0), r"the loss function must return \(loss\[B\], correct\[B\] or None\)"),
        ((torch.tensor(1.0), None), r"one loss per sample, \[B\], got \[\]"),
        ((torch.ones(32), None), r"one loss per sample: 16 for this batch, got 32"),
    ],
)
def test_losses_of_the_wrong_shape_are_refused(returned: Any, message: str) -> None:
    evaluator = BatchEvaluator(make_batches(1), lambda outputs, y: returned)
    with pytest.raises(UsageError, match=message):
        evaluate_contributions(make_garden(), evaluator)


def test_results_must_not_change_from_call_to_call() -> None:
    garden = blended_garden(1, "linear_add")
    sizes = itertools.count(5)
    with pytest.raises(UsageError, match=r"5 samples in one call and 6 in another"):
        evaluate_contributions(garden, lambda model: (torch.ones(next(sizes)), None))

    def moody() -> Iterator[tuple[Tensor, Tensor | None]]:
        yield torch.ones(3), None
        yield torch.ones(3), torch.ones(3)

    moods = moody()
    with pytest.raises(UsageError, match="correctness in some calls and None in others"):
        evaluate_contributions(garden, lambda model: next(moods))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(bad: float) -> None:
    loss = torch.ones(5)
    loss[1] = bad
    with pytest.raises(NonFiniteError, match="validation loss of 1 of 5 samples is not finite"):
        evaluate_contributions(make_garden(), lambda model: (loss, None))
