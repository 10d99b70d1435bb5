from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import evaluation
from esper.kasmina.contribution import plan_ablations
from esper.kasmina.evaluation import (
    BatchEvaluator,
    Evaluator,
    FunctionEvaluator,
    as_evaluator,
    evaluate_contributions,
)
from esper.kasmina.garden import Garden
from esper.kasmina.training import per_sample_classification, per_sample_regression
from esper.leyline.errors import EsperWarning, NonFiniteError, UsageError
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
    monkeypatch.setattr(evaluation, "pass_samples", lambda *_: limit)
    again, right = evaluator.measure(garden, configurations)
    assert passes == 2 * {1: 24, 40: 5, 100: 2, 10**9: 1}[limit]
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


# ------------------------------------------------------------------------ what cannot be shared


class Wired(nn.Module):
    """Three places to grow, wired as the test wants them."""

    def __init__(self, wiring: str) -> None:
        super().__init__()
        self.wiring = wiring
        self.stem, self.body, self.neck = (nn.Linear(6, 6) for _ in range(3))
        self.enter, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6, track_running_stats=wiring != "batch norm")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if self.wiring == "backwards":
            h = torch.tanh(self.stem(torch.tanh(self.body(torch.tanh(self.neck(x))))))
        elif self.wiring == "residual":
            h = torch.tanh(self.neck(x + torch.tanh(self.body(torch.tanh(self.stem(x))))))
        elif self.wiring == "side by side":
            h = torch.tanh(self.stem(x)) * torch.tanh(self.body(x)) + torch.tanh(self.neck(x))
        elif self.wiring == "pooled":
            h = torch.tanh(self.neck(self.body(self.stem(x))))
            h = h.reshape(len(x), -1, 6).mean(1)
        else:
            h = torch.tanh(self.norm(self.neck(self.body(self.stem(x)))))
        scores: Tensor = self.head(h)
        return scores


def wired_garden(wiring: str, dtype: torch.dtype = torch.float64) -> Garden:
    torch.manual_seed(1)
    model = Wired(wiring).to(dtype)
    garden = Garden(model, SLOTS, torch.zeros(2, 4, dtype=dtype), config=EAGER)
    for number, slot in enumerate(SLOTS):
        raise_seed(garden, slot, style=STYLES[number + 1], ticks=number + 1)
    shake(garden)
    return garden


def double_batches(size: int = 17) -> list[Batch]:
    return [(x.double(), y) for x, y in make_batches(2, size, seed=9)]


@pytest.mark.parametrize("wiring", ["backwards", "plain"])
def test_slots_are_shared_in_whatever_order_they_run(wiring: str) -> None:
    garden, batches = wired_garden(wiring), double_batches()
    configurations = plan_ablations([True] * 3)[torch.randperm(8)]
    evaluator = BatchEvaluator(batches, per_sample_classification)
    rows: dict[str, list[int]] = {}
    for name in ("enter", *SLOTS, "head"):
        garden.model.get_submodule(name).register_forward_hook(
            lambda _, args, __, name=name: rows.setdefault(name, []).append(len(args[0]))
        )
    shared, _ = evaluator.measure(garden, configurations)
    order = ["neck", "body", "stem"] if wiring == "backwards" else ["stem", "body", "neck"]
    assert evaluator.problem is None
    assert [rows[name][0] for name in ("enter", *order, "head")] == [17, 17, 34, 68, 136]
    expected, _ = measured_by_hand(garden, configurations, batches)
    torch.testing.assert_close(shared, expected, rtol=1e-12, atol=0)
    assert len({tuple(row) for row in shared.tolist()}) == 8


@pytest.mark.parametrize(
    ("wiring", "reason"),
    [
        ("residual", r"cannot run them together as one longer batch \(The size of tensor"),
        ("side by side", r"slot 'body' got 17 samples where 34 were expected"),
        ("pooled", r"cannot run them together as one longer batch"),
        ("batch norm", r"'model.norm' normalises over the batch even when it evaluates"),
    ],
)
def test_what_cannot_be_shared_says_why_and_gives_the_same_numbers(
    wiring: str, reason: str
) -> None:
    garden, batches = wired_garden(wiring), double_batches()
    configurations = plan_ablations([True] * 3)
    evaluator = BatchEvaluator(batches, per_sample_classification)
    with pytest.warns(EsperWarning, match=reason) as caught:
        loss, correct = evaluator.measure(garden, configurations)
    assert len(caught) == 1
    assert evaluator.problem is not None
    assert evaluator.problem in str(caught[0].message)
    expected, right = measured_by_hand(garden, configurations, batches)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert correct is not None
    assert torch.equal(correct, right)
    # It was said once, and is not tried again.
    again, _ = evaluator.measure(garden, configurations)
    assert torch.equal(again, loss)
    assert all(slot.branch is None and slot.sample_alphas is None for slot in garden.seedbed)


def test_other_slots_of_the_same_model_still_share() -> None:
    garden, batches = wired_garden("residual"), double_batches()
    evaluator = BatchEvaluator(batches, per_sample_classification)
    with pytest.warns(EsperWarning, match="around a slot"):
        evaluator.measure(garden, plan_ablations([True, False, False]))
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    garden.model.register_forward_hook(count)
    configurations = plan_ablations([False, False, True])
    loss, _ = evaluator.measure(garden, configurations)
    assert passes == 2
    expected, _ = measured_by_hand(garden, configurations, batches)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_a_model_that_fails_in_any_case_raises_its_own_error() -> None:
    garden = blended_garden(2, "linear_add")
    evaluator = BatchEvaluator([(torch.zeros(6, 5), torch.zeros(6).long())], lambda *_: None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluator.measure(garden, plan_ablations([True, True, False]))
    assert evaluator.problem is None


def test_targets_that_samples_share_are_not_repeated() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(outputs: Tensor, target: Any) -> tuple[Tensor, None]:
        labels, weight = target
        return nn.functional.cross_entropy(outputs, labels, weight, reduction="none"), None

    garden = blended_garden(2, "linear_add")
    batches = [(x, (y, weights)) for x, y in make_batches(2, 16, seed=9)]
    configurations = plan_ablations([True, True, False])
    with pytest.warns(EsperWarning, match="no entry for each sample"):
        loss, _ = BatchEvaluator(batches, weighted).measure(garden, configurations)
    plain, _ = measured_by_hand(garden, configurations, make_batches(2, 16, seed=9))
    expected = plain * weights[torch.cat([y for _, (y, _) in batches])]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_a_seed_gone_mad_spoils_its_own_configurations_alone() -> None:
    garden = blended_garden(2, "linear_add")
    with torch.no_grad():
        next(garden.slot_parameters("body")).fill_(torch.nan)
    configurations = plan_ablations([True, True, False])
    evaluator = BatchEvaluator(make_batches(2, 16, seed=9), per_sample_classification)
    loss, _ = evaluator.measure(garden, configurations)
    assert torch.equal(loss.isfinite().all(1), ~configurations[:, 1])
    assert torch.equal(loss.isfinite().any(1), ~configurations[:, 1])
    assert evaluator.problem is None
    with pytest.raises(NonFiniteError, match="of 128 samples is not finite; lower the learning"):
        evaluate_contributions(garden, evaluator)


def test_more_than_four_seeds_and_a_precision_of_its_own() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    names = [f"layers.{index}" for index in range(6)]
    garden = Garden(Deep(), names, torch.zeros(2, 4), config=EAGER)
    for name in names:
        raise_seed(garden, name, style="linear_add", ticks=2)
    shake(garden)
    configurations = plan_ablations([True] * 6)
    assert len(configurations) == 29
    batches = [(x, y) for x, y in make_batches(2, 16, seed=9)]
    evaluator = BatchEvaluator(
        batches,
        per_sample_classification,
        precision=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    low, _ = evaluator.measure(garden, configurations)
    plain, _ = BatchEvaluator(batches, per_sample_classification).measure(garden, configurations)
    expected, _ = measured_by_hand(garden, configurations, batches)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(low.float(), expected, rtol=0.1, atol=0.05)
    assert not torch.equal(low.float(), plain)
    assert evaluator.problem is None


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
    evaluator = BatchEvaluator(packed, per_sample_classification)
    with pytest.warns(EsperWarning, match="no entry for each sample"):
        fused, _ = evaluator.measure(garden, configurations)

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
        ((torch.ones(3, 1), None), r"one loss per sample, \[M\], got \[3, 1\]"),
        ((torch.tensor(1.0), None), r"one loss per sample, \[M\], got \[\]"),
        ((1.0, None), r"one loss per sample, \[M\], got float"),
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
