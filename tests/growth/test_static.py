from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.growth.grown import Grown
from esper.kasmina.garden import Garden
from esper.leyline.errors import EsperWarning, UsageError
from tests.growth.depth.models import make_gpt
from tests.plots import GROW_ONE, SLOTS, Batch, Script, growth_config, make_batches, make_net

pytestmark = pytest.mark.filterwarnings("ignore:A static network of the same size")

EPOCHS = 9


def grow(model: nn.Module | None = None, **changes: Any) -> Grown:
    options: dict[str, Any] = {
        "train": make_batches(),
        "val": make_batches(2, 32, seed=9),
        "epochs": EPOCHS,
        "controller": Script(GROW_ONE),
        "config": growth_config(1),
        **changes,
    }
    return esper.grow(make_net() if model is None else model, SLOTS, **options)


def test_the_grown_architecture_is_trained_from_scratch_by_the_same_recipe() -> None:
    batches = Counted(make_batches())
    grown = grow(train=batches, test=make_batches(2, 32, seed=10))
    x = torch.randn(5, 4)
    before, passes = grown.model(x), batches.passes
    found = grown.compare_static()
    assert batches.passes == passes + EPOCHS
    assert torch.equal(grown.model(x), before)
    assert isinstance(found.model, Garden)
    assert [view.blueprint for view in found.model.slots.values()] == ["mlp_small", None, None]
    assert found.static.parameters_before == found.static.parameters_after
    assert found.static.parameters_after == grown.summary.parameters_after
    assert 0.5 < found.compute < 1.0
    difference = grown.summary.val_score - found.static.val_score
    assert found.val_difference.value == pytest.approx(difference)
    told = str(found)
    assert "\n" not in told
    for split in (grown.summary.val_score, found.static.val_score, found.static.test_score):
        assert f"{split:.2f}" in told
    assert "on the validation data" in told
    assert "on the test data" in told
    # Nothing of the first comparison is left in the recipe.
    assert grown.compare_static().static.val_score == found.static.val_score


def test_it_starts_with_the_first_weights_and_fresh_seeds() -> None:
    grown = grow(optimizer=partial(torch.optim.SGD, lr=1e-6), keep="last")
    with torch.no_grad():
        for parameter in grown.model.parameters():
            parameter.add_(1.0)
    found = grown.compare_static()
    first = make_net().state_dict()
    assert isinstance(found.model, Garden)
    for name, value in found.model.state_dict().items():
        if name.startswith("model."):
            torch.testing.assert_close(value, first[name.removeprefix("model.")], atol=1e-3, rtol=0)
        elif value.is_floating_point():
            assert not torch.allclose(value, grown.model.state_dict()[name], atol=0.1)


def test_an_optimizer_and_a_schedule_begin_anew() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    grown = grow(model, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] < 0.01
    score = grown.compare_static().static.val_score
    by_function = grow(
        optimizer=partial(torch.optim.SGD, lr=0.5),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS),
    )
    assert by_function.compare_static().static.val_score == score


def test_a_run_that_stopped_early_is_compared_at_its_length() -> None:
    def stop(record: Any) -> None:
        if record.epoch == 7:
            raise StopIteration

    grown = grow(on_epoch=stop)
    assert grown.compare_static().static.epochs == grown.summary.epochs == 7


def test_epochs_are_shown_where_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    grown = grow()
    grown.compare_static()
    assert capsys.readouterr().err == ""
    grown.compare_static(progress=True)
    assert f"epoch {EPOCHS}/{EPOCHS}  val score" in capsys.readouterr().err


def test_another_network_is_trained_as_it_is() -> None:
    grown = grow()
    wide = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3))
    found = grown.compare_static(wide)
    assert found.model is wide
    assert f"and {4 * 40 + 40 + 40 * 3 + 3:,} parameters" in str(found)
    model = make_net()
    grown = grow(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"optimizer=torch\.optim\.AdamW"):
        grown.compare_static(wide)


@pytest.mark.filterwarnings("ignore:Nothing grew")
def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(UsageError, match="nothing grew"):
        grow(controller="wait").compare_static()
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module, got str; write grown"):
        grow().compare_static("net")  # type: ignore[arg-type]
    passes = iter(make_batches(40))
    grown = grow(train=passes, decide_every=4, epochs=EPOCHS)
    with pytest.raises(UsageError, match="train was an iterator"):
        grown.compare_static()


def test_a_model_that_cannot_be_copied_is_grown_all_the_same() -> None:
    model = make_net()
    model.lock = threading.Lock()
    grown = grow(model)
    assert grown.summary.parameters_after > grown.summary.parameters_before
    with pytest.raises(UsageError, match=r"could not be copied.*grown\.compare_static\(model\)"):
        grown.compare_static()
    assert grown.compare_static(make_net()).static.epochs == EPOCHS


def test_of_a_deepened_network_it_is_the_one_with_all_blocks() -> None:
    def deepen(*, twin: bool) -> tuple[Grown, Counted]:
        generator = torch.Generator().manual_seed(3)
        tokens = [torch.randint(11, (8, 9), generator=generator) for _ in range(6)]
        batches = Counted([(each[:, :-1], each[:, 1:]) for each in tokens])
        options: dict[str, Any] = {"loss": "language", "optimizer": torch.optim.AdamW}
        grown = esper.grow(
            make_gpt(),
            train=batches,
            val=list(batches)[:2],
            epochs=5,
            deepen=True,
            keep="last",
            twin=twin,
            **options,
        )
        return grown, batches

    grown, batches = deepen(twin=False)
    passes = batches.passes
    found = grown.compare_static()
    assert batches.passes == passes + 5
    assert found.static.parameters_after == grown.summary.parameters_after
    assert found.compute == pytest.approx(
        (grown.summary.training_flops or 0) / (grown.summary.static_flops or 1)
    )
    beside, batches = deepen(twin=True)
    passes = batches.passes
    known = beside.compare_static()
    assert batches.passes == passes, "the twin was trained already"
    assert known.static.val_score == beside.summary.twin_val_score
    assert known.static.val_score == pytest.approx(found.static.val_score)
    assert known.val_difference.value == pytest.approx(found.val_difference.value)


class Counted(list[Batch]):
    """Batches that count how often they are read."""

    passes = 0

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        return super().__iter__()


def test_it_is_a_warning_at_the_end_of_a_growth() -> None:
    # Seeds that cannot learn are worth nothing.
    with pytest.warns(EsperWarning, match=r"is likely to do as well: .*grown\.compare_static\(\)"):
        grown = grow(optimizer=partial(torch.optim.SGD, lr=1e-6), keep="last")
    assert "is likely to do as well" in grown.static_warning
    assert grown.why == ()
