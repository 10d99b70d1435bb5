from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import update_bn

from esper.growth.config import GardenerConfig, GrowthConfig
from esper.growth.request import GrowRequest
from esper.growth.run import GrowthLoop
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.training import per_sample_classification, rate_factor, seed_rate_factor
from esper.lab.tasks import TrainingConfig
from esper.leyline.errors import EsperWarning, NonFiniteError, SlotError, UsageError
from esper.utils.storage import load_tree, save_tree
from tests.plots import (
    CLASSES,
    EAGER,
    FEATURES,
    GROW_ONE,
    SLOTS,
    Batch,
    Script,
    frozen,
    growth_config,
    make_batches,
    make_net,
    plain_history,
    same,
)

FACTORY = partial(SGD, lr=0.1, momentum=0.9)
TRAIN, VAL, TEST = make_batches(4), make_batches(2, 32, seed=9), make_batches(2, 32, seed=10)


def make_run(controller: Any = None, epochs: int = 8, **changes: Any) -> GrowthLoop:
    """A run of the tiny network; the script that grows one seed unless told otherwise."""
    options = {
        "slots": SLOTS,
        "train": TRAIN,
        "val": VAL,
        "loss": per_sample_classification,
        "optimizer": FACTORY,
        **{key: changes.pop(key) for key in list(changes) if key in _PARTS},
    }
    dropout = options.pop("dropout", 0.0)
    model = options.pop("model", None) or make_net(dropout=dropout)
    config = growth_config(epochs, **changes)
    script = Script(GROW_ONE) if controller is None else controller
    return GrowthLoop(GrowRequest(model=model, controller=script, config=config, **options))


_PARTS = (
    "model",
    "dropout",
    "slots",
    "train",
    "val",
    "test",
    "loss",
    "optimizer",
    "scheduler",
)


OWN_RATES = TrainingConfig(
    optimizer="adamw", learning_rate=0.01, schedule="cosine", seed_rate="own", seed_warmup=2
)


def finish(run: GrowthLoop) -> GrowthLoop:
    for _ in run.epochs():
        pass
    return run


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: min(1.0, 0.25 * (1 + epoch)))


# ------------------------------------------------------------------------------------------ twins


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler": warm_up},
        {"optimizer": partial(AdamW, lr=0.01)},
        {"garden": EAGER.replace(training_mode="shadow")},
        {"training": TrainingConfig(max_grad_norm=0.05)},
        {"optimizer": None, "training": OWN_RATES},
        {"dropout": 0.5},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_the_twin_is_a_run_that_only_waits_bit_for_bit(options: dict[str, Any]) -> None:
    grown = finish(make_run(twin=True, test=TEST, **options))
    alone = finish(make_run("wait", test=TEST, **options))
    assert grown.twin is not None
    assert same(grown.twin.garden.model.state_dict(), alone.garden.model.state_dict())
    assert [record.twin_score for record in grown.history] == [
        record.val_score for record in alone.history
    ]
    assert grown.finish().summary.twin_test_score == alone.finish().summary.test_score
    # The grown network did become another one.
    own, waiting = (dict(run.garden.model.named_parameters()) for run in (grown, alone))
    assert not same(own, waiting)


def test_every_seed_learns_at_its_own_rate_and_the_twin_at_the_hosts() -> None:
    run = make_run(twin=True, optimizer=None, training=OWN_RATES)
    horizon, learned = run.config.epochs, [0] * len(SLOTS)
    for record in run.epochs():
        host, *seeds = [group["lr"] for group in run.trainee.optimizer.param_groups]
        assert host == 0.01 * rate_factor(OWN_RATES, record.epoch, horizon)
        for rate, passed in zip(seeds, learned, strict=True):
            assert rate == 0.01 * seed_rate_factor(OWN_RATES, record.epoch, horizon, passed)
        if run.twin is not None and run.twin.optimizer.state:
            assert run.twin.optimizer.param_groups[0]["lr"] == host
        learned = run.garden.state.learned[0].tolist()
        # The controller sees the rate of the epoch to come.
        share = rate_factor(OWN_RATES, record.epoch + 1, horizon)
        assert float(run.gardener.signals().rate_factor) == pytest.approx(share)
        assert float(run.gardener.signals().learning_rate) == pytest.approx(0.01 * share)
    assert max(learned) > 2
    assert max(seeds) > host


def test_training_a_twin_beside_it_does_not_change_the_network() -> None:
    for dropout in (0.0, 0.5):
        one = finish(make_run(twin=True, dropout=dropout))
        other = finish(make_run(twin=False, dropout=dropout))
        assert same(one.garden.state_dict(), other.garden.state_dict())
        assert [record.twin_score for record in other.history] == [None] * 8


def test_a_network_that_never_acts_is_its_own_twin() -> None:
    run = finish(make_run("wait", twin=True, test=TEST))
    assert run.twin is None
    assert [record.twin_score for record in run.history] == [
        record.val_score for record in run.history
    ]
    grown = run.finish()
    assert grown.twin is None
    assert grown.summary.twin_test_score == grown.summary.test_score is not None
    assert grown.summary.twin_val_score == grown.summary.val_score


def test_the_twin_is_forked_when_the_first_action_is_taken() -> None:
    run = make_run(twin=True)
    twins = [run.twin is not None for _ in run.epochs()]
    assert twins == [False, *[True] * 7]
    # Its weights at that moment were those of the network.
    scores = [(record.val_score, record.twin_score) for record in run.history]
    assert all(score == twin for score, twin in scores[:4])
    assert run.twin is not None
    assert run.twin.garden.count_parameters() == run.parameters_before


# ------------------------------------------------------------------------------- repeating a run


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (finish(make_run("random", 14, twin=True, dropout=0.3)) for _ in range(2))
    assert plain_history(first.history) == plain_history(second.history)
    assert same(first.garden.state_dict(), second.garden.state_dict())


def test_another_seed_gives_another_run() -> None:
    first, second = (finish(make_run("random", 14, seed=seed)) for seed in (0, 1))
    assert plain_history(first.history) != plain_history(second.history)
    # Also where the decisions are the same: seeds start from other weights.
    grown = [finish(make_run(seed=seed)) for seed in (0, 1)]
    assert not same(grown[0].garden.state_dict(), grown[1].garden.state_dict())
    assert same(
        [record.decision for record in grown[0].history],
        [record.decision for record in grown[1].history],
    )


def test_the_global_random_numbers_are_left_alone() -> None:
    """What the owner of the loop draws does not depend on what grows, nor the other way round."""
    run = make_run(twin=True, dropout=0.5)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = plain_history(finish(run).history)
    assert torch.equal(torch.get_rng_state(), before)
    run = make_run(twin=True, dropout=0.5)
    torch.manual_seed(456)
    assert plain_history(finish(run).history) == first


@pytest.mark.parametrize(
    "learning",
    [
        {"scheduler": warm_up},
        {"scheduler": warm_up, "dropout": 0.5},
        {"optimizer": None, "training": OWN_RATES},
    ],
    ids=["plain", "dropout", "settings"],
)
def test_a_restored_run_ends_bit_identical(learning: dict[str, Any], tmp_path: Path) -> None:
    options = {"twin": True, "test": TEST, **learning}
    dropout = learning.get("dropout", 0.0)
    whole = finish(make_run(**options))
    summary = whole.finish().summary
    first, stops = make_run(**options), (1, 3, 5, 8)
    for record in first.epochs():
        if record.epoch in stops:
            save_tree(tmp_path / str(record.epoch), first.state_dict(), kind="test", version=1)

    for stop in stops:
        second = make_run(**{**options, "model": make_net(seed=50, dropout=dropout)})
        second.load_state_dict(load_tree(tmp_path / str(stop), kind="test", version=1)[0])
        finish(second)
        assert plain_history(second.history) == plain_history(whole.history)
        assert same(second.garden.state_dict(), whole.garden.state_dict())
        own = second.finish().summary
        assert {**own.to_mapping(), "seconds": 0} == {**summary.to_mapping(), "seconds": 0}
        assert (second.twin is None) == (whole.twin is None)
        if second.twin is not None and whole.twin is not None:
            assert same(second.twin.state_dict(), whole.twin.state_dict())


def test_a_run_can_go_back_to_an_earlier_state_of_its_own() -> None:
    run = make_run(twin=True)
    epochs = run.epochs()
    next(epochs)
    saved = frozen(run.state_dict())
    finish(run)
    first = plain_history(run.history)
    run.load_state_dict(saved)
    assert run.twin is None
    finish(run)
    assert plain_history(run.history) == first


# -------------------------------------------------------------------------------------- finishing


def test_the_test_split_is_touched_once_at_the_end() -> None:
    class Counting:
        count = 0

        def __iter__(self) -> Iterator[Batch]:
            self.count += 1
            return iter(TEST)

    batches = Counting()
    run = finish(make_run("wait", 2, twin=True, test=batches))
    assert batches.count == 0
    run.finish()
    assert batches.count == 1


def test_what_was_grown_is_told_in_the_summary() -> None:
    run = finish(make_run(twin=True, test=TEST))
    grown = run.finish()
    summary = grown.summary
    assert (summary.task, summary.controller, summary.seed, summary.epochs) == (
        "model",
        "Script",
        3,
        8,
    )
    assert summary.parameters_before < summary.parameters_after
    assert summary.parameters_after == sum(p.numel() for p in grown.model.parameters())
    (seed,) = summary.seeds
    assert (seed.slot, seed.blueprint, seed.germinated, seed.fate) == (
        "stem",
        "mlp_small",
        2,
        "blending",
    )
    assert set(grown.contributions.leave_one_out) == {"stem"}
    assert set(grown.contributions.shapley) == {"stem"}
    assert grown.model is run.garden
    assert not grown.model.training
    assert grown.twin is not None
    assert len(grown.history) == 8
    assert summary.seconds > 0


# ---------------------------------------------------------------------------- which network is kept


def scored(run: GrowthLoop) -> list[float]:
    """The score of every epoch, and of what the run returns, measured by itself."""
    for _ in run.epochs():
        pass
    return [record.val_score for record in run.history]


def accuracy(model: nn.Module, batches: list[Batch] = VAL) -> float:
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        return 100 * float((model.eval()(x).argmax(1) == y).double().mean())


class Spoiled:
    """Batches whose labels are wrong after epoch 5: a network gets worse from there on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter([(x, (y + (self.epoch > 5)) % CLASSES) for x, y in TRAIN])


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_network_that_is_kept_is_the_one_that_was_measured(keep: str) -> None:
    run = make_run(keep=keep, twin=True, test=TEST, epochs=9, train=Spoiled())
    scores = scored(run)
    twins = [record.twin_score or 0.0 for record in run.history]
    grown = run.finish()
    summary = grown.summary
    kept = 1 + scores.index(max(scores)) if keep == "best" else 9
    twin_kept = 1 + twins.index(max(twins)) if keep == "best" else 9
    assert (summary.kept_epoch, summary.twin_kept_epoch) == (kept, twin_kept)
    assert summary.val_score == scores[kept - 1] == pytest.approx(accuracy(grown.model))
    assert grown.twin is not None
    assert summary.twin_val_score == twins[twin_kept - 1] == pytest.approx(accuracy(grown.twin))
    assert summary.test_score == pytest.approx(accuracy(grown.model, TEST))
    assert summary.twin_test_score == pytest.approx(accuracy(grown.twin, TEST))
    assert summary.parameters_after == grown.model.count_parameters()
    assert max(scores) > scores[-1], "the case shows nothing"


def test_a_network_that_never_acts_is_its_own_twin_in_its_best_epoch_too() -> None:
    run = make_run("wait", keep="best", twin=True, test=TEST, train=Spoiled())
    scores = scored(run)
    summary = run.finish().summary
    assert summary.twin_val_score == summary.val_score == max(scores)
    assert summary.twin_kept_epoch == summary.kept_epoch
    assert summary.twin_test_score == summary.test_score


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_what_is_returned_of_a_run_that_stopped_is_what_was_measured(stop: int) -> None:
    # Every epoch is followed by an action or by a step of the amplitude.
    run = make_run(keep="last", epochs=9)
    for record in run.epochs():
        if record.epoch == stop:
            run.stop("enough")
    grown = run.finish()
    assert (grown.summary.epochs, grown.summary.kept_epoch) == (stop, stop)
    assert grown.summary.stopped == "enough"
    alpha = run.history[-1].slots[0].alpha
    assert grown.model.slots["stem"].alpha == alpha
    assert grown.summary.val_score == pytest.approx(accuracy(grown.model))


def test_patience_ends_a_run_and_names_the_seed_that_it_has_caught() -> None:
    still = {"optimizer": partial(SGD, lr=0.0)}
    run = make_run(keep="best", patience=4, epochs=9, **still)
    assert len(scored(run)) == 5
    assert run.is_done
    grown = run.finish()
    assert (grown.summary.kept_epoch, grown.summary.epochs) == (1, 5)
    told = "no better validation score in 4 epochs"
    assert grown.summary.stopped == told
    assert grown.why[0] == (
        f"The run stopped after epoch 5 ({told}), when the mlp_small at stem was still being "
        "blended in."
    )
    assert repr(grown).endswith("grew nothing, epoch 1 of 5)")
    patient = make_run(keep="best", patience=9, epochs=9, **still)
    assert len(scored(patient)) == 9
    assert patient.finish().summary.stopped == ""


def test_patience_begins_anew_with_every_better_epoch() -> None:
    run = make_run("wait", keep="best", patience=5, epochs=40, train=Spoiled())
    scores = scored(run)
    assert len(scores) == 1 + scores.index(max(scores)) + 5


def test_a_run_that_stopped_goes_on_when_it_is_given_another_length() -> None:
    first = make_run("wait", 4)
    for _ in first.epochs():
        first.stop("enough")
    assert first.gardener.epoch == 1
    saved = frozen(first.state_dict())
    again, longer = make_run("wait", 4), make_run("wait", 5)
    for run in (again, longer):
        run.load_state_dict(saved)
    assert (again.is_done, longer.is_done) == (True, False)
    assert len(scored(longer)) == 5


def test_a_run_that_stopped_and_kept_its_best_cannot_return_its_last() -> None:
    first = make_run(keep="best")
    for _ in first.epochs():
        first.stop("enough")
    other = make_run(keep="last")
    other.load_state_dict(frozen(first.state_dict()))
    with pytest.raises(UsageError, match=r"stopped early, after epoch 1.*keep='best'"):
        other.finish()


# ------------------------------------------------------------------------- statistics of BatchNorm


class Normed(nn.Module):
    """Features [B, 4] to class scores [B, 3], with statistics of the batch behind its slots."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.norm(self.stem(x))))
        return scores


def make_normed(**changes: Any) -> GrowthLoop:
    torch.manual_seed(0)
    return make_run(model=Normed(), slots=["stem"], **changes)


def fresh(model: nn.Module, batches: list[Batch] = TRAIN) -> nn.Module:
    """A copy with statistics taken by PyTorch's own tool."""
    copied = copy.deepcopy(model).train()
    update_bn([x for x, _ in batches], copied)
    return copied.eval()


@pytest.mark.parametrize("keep", ["best", "last"])
def test_network_and_twin_are_returned_with_statistics_that_fit(keep: str) -> None:
    run = make_normed(keep=keep, twin=True, epochs=9)
    scored(run)
    assert [record.statistics_samples for record in run.history] == [
        sum(len(y) for _, y in TRAIN)
    ] * 9
    grown = run.finish()
    assert grown.twin is not None
    if keep == "last":
        assert grown.model.slots["stem"].alpha > 0
    for network in (grown.bake(), grown.twin):
        x = torch.cat([x for x, _ in VAL])
        torch.testing.assert_close(network.eval()(x), fresh(network)(x), rtol=1e-3, atol=1e-4)


def test_no_more_samples_are_used_than_asked_for() -> None:
    for most in (2 * len(TRAIN[0][1]), 0):
        settings = GardenerConfig(statistics_samples=most)
        run = make_normed(controller="wait", epochs=1, gardener=settings)
        scored(run)
        assert run.history[0].statistics_samples == most
    plain = make_run("wait", 1)
    scored(plain)
    assert plain.history[0].statistics_samples == 0


class Partial(list[Batch]):
    """Batches of an epoch that leaves samples out, but can name all of them."""

    def __init__(self, whole: list[Batch]) -> None:
        super().__init__(whole[:2])
        self.whole = whole

    def calibration_batches(self) -> list[Batch]:
        return self.whole


@pytest.mark.parametrize("decide_every", [0, 1])
def test_statistics_are_those_of_the_whole_set_where_an_epoch_is_not(decide_every: int) -> None:
    run = make_normed(keep="last", epochs=9, train=Partial(TRAIN), decide_every=decide_every)
    scored(run)
    whole = sum(len(y) for _, y in TRAIN)
    assert [record.statistics_samples for record in run.history] == [whole] * 9
    network, x = run.finish().bake(), torch.cat([x for x, _ in VAL])
    torch.testing.assert_close(network.eval()(x), fresh(network)(x), rtol=1e-3, atol=1e-4)
    part = fresh(network, TRAIN[:2])
    assert not torch.allclose(network(x), part(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("train", [TRAIN, Partial(TRAIN)], ids=["epoch", "calibration"])
def test_a_restored_run_has_the_same_statistics_and_contributions(
    train: list[Batch], tmp_path: Path
) -> None:
    options = {"keep": "best", "twin": True, "test": TEST, "epochs": 9, "train": train}
    whole = make_normed(**options)
    scored(whole)
    other = whole.finish()
    first, stops = make_normed(**options), (3, 6, 9)
    for record in first.epochs():
        if record.epoch in stops:
            save_tree(tmp_path / str(record.epoch), first.state_dict(), kind="test", version=1)
    for stop in stops:
        second = make_normed(**options)
        second.load_state_dict(load_tree(tmp_path / str(stop), kind="test", version=1)[0])
        scored(second)
        assert plain_history(second.history) == plain_history(whole.history)
        one = second.finish()
        assert replace(one.summary, seconds=0.0) == replace(other.summary, seconds=0.0)
        assert one.contributions == other.contributions
        assert same(one.model.state_dict(), other.model.state_dict())


def test_without_test_batches_there_is_no_test_score() -> None:
    summary = finish(make_run("wait", 1, twin=True)).finish().summary
    assert summary.test_score is None
    assert summary.twin_test_score is None


def test_epochs_are_announced_to_batches_that_want_to_know() -> None:
    class Ordered(list[Batch]):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    batches = Ordered(TRAIN)
    finish(make_run("wait", 3, train=batches))
    assert batches.epochs == [1, 2, 3]


def test_the_seed_of_the_run_is_the_seed_of_its_garden() -> None:
    run = make_run(seed=11, garden=GardenConfig(seed=5))
    assert run.garden.config.seed == 11


# --------------------------------------------------------------------------------------- refusals


def test_empty_sets_are_refused() -> None:
    with pytest.raises(UsageError, match="the validation set is empty; give it at least one batch"):
        make_run(val=[])
    # Before anything is trained.
    for empty in ([], [(torch.zeros(0, 4), torch.zeros(0).long())]):
        with pytest.raises(UsageError, match="the test set is empty; give it at least one batch"):
            make_run(test=empty)
    run = make_run(train=[])
    with pytest.raises(UsageError, match="the training set is empty; give it at least one batch"):
        finish(run)


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_batches_that_can_be_read_only_once_are_refused(name: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"{name} is an iterator",
    ):
        make_run(**{name: iter(TRAIN)})


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, FEATURES),
        (torch.zeros(2, FEATURES),),
        7,
    ],
    ids=["tensor", "one", "number"],
)
def test_batches_that_are_no_pairs_are_refused(batch: Any) -> None:
    refusal = r"must be \(inputs, targets\) pairs, .*got a|a list of tensors, not of batches"
    with pytest.raises(UsageError, match=refusal):
        make_run(val=[batch])
    with pytest.raises(UsageError, match=refusal):
        finish(make_run(train=[batch]))


def test_a_model_that_cannot_take_the_batches_is_refused() -> None:
    wrong = [(torch.zeros(2, FEATURES + 1), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(
        UsageError, match=r"the model cannot take a validation batch .*2, 5.*: "
    ) as e:
        make_run(val=wrong)
    assert "\n" not in str(e.value)
    assert isinstance(e.value.__cause__, RuntimeError)


def test_a_loss_that_does_not_suit_the_model_is_refused_before_training() -> None:
    labels = [(x, y + 100) for x, y in VAL]
    with pytest.raises(UsageError, match=r"taken of outputs \[32, 3\] and targets \[32\]: "):
        make_run(val=labels)


def test_a_wrong_slot_is_named() -> None:
    told = "no submodule 'boddy', did you mean 'body'.*; esper.suggest_slots"
    with pytest.raises(SlotError, match=told):
        make_run(slots=["boddy"])


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        (
            lambda x, y: {"pixels": x, "labels": y},
            r"batch {pixels: \[32, 4\]} as the one argument of its forward; rename its keys, or",
        ),
        (lambda x, y: (x, x, y), r"a batch is \(input, target\), or \(input, ..., target\)"),
    ],
    ids=["dict", "two inputs"],
)
def test_batches_that_do_not_fit_forward_are_refused_with_what_to_give(
    batch: Callable[..., Any], advice: str
) -> None:
    with pytest.raises(UsageError, match=advice):
        make_run(val=[batch(x, y) for x, y in VAL])


def test_a_training_loss_that_stays_infinite_stops_the_run() -> None:
    def explode(outputs: Tensor, y: Tensor) -> tuple[Tensor, None]:
        return outputs.sum(1) * (math.inf if outputs.requires_grad else 1.0), None

    run = make_run("wait", loss=explode)
    with (
        pytest.warns(EsperWarning, match="the validation loss was not finite") as told,
        pytest.raises(NonFiniteError, match="not finite in 3 epochs in a row"),
    ):
        finish(run)
    assert [str(one.message).partition(":")[0] for one in told] == ["epoch 1", "epoch 2"]
    assert [record.rollback for record in run.history] == ["not_finite"] * 2


def test_one_bad_epoch_does_not_end_the_run() -> None:
    calls = iter(range(10_000))

    def hiccup(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = per_sample_classification(outputs, y)
        bad = outputs.requires_grad and next(calls) == 5
        return loss * (math.inf if bad else 1.0), correct

    run = make_run("wait", loss=hiccup, epochs=6)
    with pytest.warns(EsperWarning, match="rolled back"):
        finish(run)
    assert [record.rollback for record in run.history].count("not_finite") == 1
    assert math.isfinite(run.history[-1].val_loss)
    assert run.gardener.epoch == 6


def test_a_seed_that_goes_mad_in_training_is_pruned_and_the_rest_goes_on() -> None:
    run = make_run(epochs=7, twin=True)
    epochs = run.epochs()
    for _ in range(3):
        next(epochs)  # the seed trains from now on
    with torch.no_grad():
        for parameter in run.garden.seedbed.parameters():
            parameter.fill_(math.nan)
    with pytest.warns(EsperWarning, match=r"epoch 4: the gradients of the seed in .* not finite"):
        record = next(epochs)
    assert record.rollback is None
    assert record.slots[0].stage == "PRUNED"
    for record in epochs:
        # The host never noticed: it is what its twin is.
        assert record.val_score == record.twin_score
    assert run.garden.count_parameters() == run.parameters_before


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match=r"GrowthConfig\.epochs must be at least 1, got 0"):
        GrowthConfig(epochs=0)
    with pytest.raises(UsageError, match="GrowthConfig has no key 'epoch', did you mean 'epochs'"):
        GrowthConfig.from_mapping({"epoch": 3})


def test_a_model_without_parameters_has_a_device_too() -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.stem(x)
            return out

    run = make_run("wait", model=Still(), slots=["stem"], epochs=1, optimizer=_no_optimizer)
    assert run.device == torch.device("cpu")


def _no_optimizer(parameters: list[nn.Parameter]) -> SGD:
    return SGD([nn.Parameter(torch.zeros(1)), *parameters], lr=0.1)
