"""Whole runs that deepen a network: what is measured, kept, restored, limited and delivered."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper.growth.depth.deepen import Deepen
from esper.growth.grown import Deepened
from esper.leyline.errors import EsperWarning, UsageError
from tests.growth.depth.models import GPT, VOCABULARY, images, make_gpt, make_resnet, tokens

STEPS = 5
TRAIN = [(batch[:, :-1], batch[:, 1:]) for batch in map(tokens, range(STEPS))]
VAL = [(batch[:, :-1], batch[:, 1:]) for batch in (tokens(50), tokens(51))]


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every sample; without correctness the score is its negative."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def deepen(model: nn.Module | None = None, **changes: Any) -> Deepened:
    options = {
        "train": TRAIN,
        "val": VAL,
        "epochs": 10,
        "loss": losses,
        "optimizer": adamw,
        "deepen": True,
        "keep": "last",
        **changes,
    }
    grown = esper.grow(make_gpt() if model is None else model, **options)
    assert isinstance(grown, Deepened)
    return grown


def awake(grown: Deepened) -> list[int]:
    """Blocks awake when each epoch was measured."""
    return [sum(record.depth.awake.values()) for record in grown.history if record.depth]


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.cat([losses(model(x), y) for x, y in VAL]).double().mean())


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


# -- the schedule --------------------------------------------------------------------------------


def test_it_is_the_same_to_the_bit_as_a_loop_of_ones_own() -> None:
    grown = deepen(model := make_gpt())
    own = make_gpt()
    optimizer = adamw(own.parameters())
    depth = Deepen(own, optimizer, total_steps=10 * STEPS, example=TRAIN[0][0])
    for _ in range(10):
        for x, y in TRAIN:
            loss = losses(own(x), y).mean()
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in own.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            depth.step()
    assert grown.model is model
    assert same(model, own)
    assert grown.summary.training_flops == depth.flops
    assert [event["awake"]["blocks"] for event in depth.history] == [2, 4]


def test_an_epoch_is_measured_before_its_last_step_wakes_blocks() -> None:
    grown = deepen()
    assert awake(grown) == [1, 1, 2, 2, 4, 4, 4, 4, 4, 4]
    woken = {r.epoch: r.depth.deepenings for r in grown.history if r.depth and r.depth.deepenings}
    assert {epoch: (one.before, one.after, one.step) for epoch, (one,) in woken.items()} == {
        2: (1, 2, 10),
        4: (2, 4, 20),
    }
    assert [r.decision.op for r in grown.history if r.decision] == [
        *("WAIT", "DEEPEN", "WAIT", "DEEPEN"),
        *["WAIT"] * 5,
    ]
    assert woken[2][0].reason == "schedule: 1 to 2 blocks after step 10, at 20 % of the run"


def test_every_record_tells_sizes_and_compute_of_what_is_awake() -> None:
    grown = deepen()
    sizes = [sum(p.numel() for p in make_gpt(layers).parameters()) for layers in (1, 2, 4)]
    assert [grown.history[epoch].parameters for epoch in (0, 3, 5)] == sizes
    flops = [
        esper.count_flops(make_gpt(layers), VAL[0][0]).total // len(VAL[0][0])
        for layers in (1, 2, 4)
    ]
    assert [grown.history[epoch].flops for epoch in (0, 3, 5)] == flops
    summary = grown.summary
    assert (summary.parameters_before, summary.parameters_after) == (sizes[0], sizes[2])
    each = [3 * esper.count_flops(make_gpt(n), TRAIN[0][0]).total for n in (1, 2, 4)]
    assert summary.training_flops == 10 * each[0] + 10 * each[1] + 30 * each[2]
    assert summary.static_flops == 50 * each[2]
    assert grown.awake == {"blocks": 4}


def test_moments_are_steps_or_shares_of_the_run() -> None:
    chosen = {"start": 2, "at": {0.5: 3, 40: 4}, "order": "interleave"}
    grown = deepen(deepen=chosen)
    assert awake(grown) == [2] * 5 + [3] * 3 + [4] * 2
    assert deepen(deepen=esper.DeepenConfig(**chosen)).summary.val_score == grown.summary.val_score


def test_steps_that_count_as_an_epoch_are_those_of_the_run() -> None:
    grown = deepen(decide_every=2, epochs=10)
    assert [record.depth.step for record in grown.history if record.depth] == [*range(2, 21, 2)]
    assert awake(grown) == [1, 1, 2, 2, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("rule", ["plateau", "slope"])
def test_rules_that_judge_by_the_loss_see_it(rule: str) -> None:
    grown = deepen(deepen={"controller": rule}, epochs=20)
    assert grown.summary.controller == rule
    assert awake(grown)[-1] == 4
    assert awake(grown)[0] == 1


def test_a_function_decides() -> None:
    def all_at_once(progress: Any) -> int | None:
        return 4 if progress.step == 7 else None

    grown = deepen(deepen={"start": 1, "controller": all_at_once}, epochs=3)
    assert awake(grown) == [1, 4, 4]
    assert "all_at_once" in grown.summary.controller
    assert grown.history[1].depth.deepenings[0].step == 7  # type: ignore[union-attr]


def test_several_stacks_wake_together_with_running_statistics() -> None:
    batches = [images(step) for step in range(3)]
    grown = esper.grow(
        make_resnet(),
        train=batches,
        val=[images(60)],
        epochs=6,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        deepen=True,
        keep="last",
    )
    first, last = grown.history[0].depth, grown.history[-1].depth
    assert first is not None
    assert last is not None
    assert first.awake == {"stage1": 1, "stage2": 1}
    assert last.awake == {"stage1": 4, "stage2": 3}
    assert all(record.statistics_samples == 3 * len(batches[0][0]) for record in grown.history)
    assert [len(r.decisions) for r in grown.history if r.depth and r.depth.deepenings] == [2, 2]
    # What was measured last is what is returned.
    x, y = images(60)
    assert 100 * float((grown.model(x).argmax(1) == y).float().mean()) == pytest.approx(
        grown.summary.val_score
    )


# -- what is kept --------------------------------------------------------------------------------


def spoilt(after: int) -> Any:
    """A schedule of the rate that ruins the network after some epochs."""
    return lambda optimizer: LambdaLR(optimizer, lambda epoch: 1.0 if epoch < after else 300.0)


@pytest.mark.filterwarnings("ignore:The best validation score is that of epoch")
def test_the_best_network_comes_back_as_deep_as_it_was(tmp_path: Path) -> None:
    grown = deepen(model := make_gpt(), keep="best", scheduler=spoilt(3), out=tmp_path / "run")
    kept = grown.summary.kept_epoch
    assert kept <= 3
    blocks = awake(grown)[kept - 1]
    assert blocks < awake(grown)[-1] == 4
    assert grown.model is model
    assert len(model.blocks) == blocks == grown.awake["blocks"]
    assert loss_of(model) == pytest.approx(-grown.summary.val_score)
    assert loss_of(model) < -grown.history[-1].val_score
    assert "keep='last'" in grown.why[0]
    # Both saved networks are that one, and a model with as many blocks loads it.
    for folder in ("grown", "checkpoints/best"):
        again = esper.load_garden(tmp_path / "run" / folder, model=make_gpt(blocks, seed=3))
        assert same(again.model, model)


@pytest.mark.filterwarnings("ignore:The run stopped after epoch")
def test_patience_stops_before_all_blocks_are_awake() -> None:
    grown = deepen(scheduler=spoilt(1), patience=1, deepen={"at": {0.5: 2, 0.9: 4}})
    assert grown.summary.stopped
    assert grown.summary.epochs < 5
    assert len(grown.model.blocks) == 1
    assert any("stopped after epoch" in line for line in grown.why)


def test_nothing_of_esper_is_left_in_the_model() -> None:
    short = {"start": 2, "at": {0.3: 3}}
    for grown in (deepen(), deepen(deepen=short)):
        assert type(grown.model) is GPT
        assert b"esper" not in pickle.dumps(grown.model)
        assert not any("forward" in vars(module) for module in grown.model.modules())
        assert not any(module._forward_pre_hooks for module in grown.model.modules())
        plain = grown.bake()
        assert plain is not grown.model
        assert same(plain, grown.model)
    assert len(grown.model.blocks) == 3


def test_an_export_is_the_network_that_is_awake(tmp_path: Path) -> None:
    grown = deepen(epochs=3, deepen={"start": 2, "at": {14: 3}})
    path = grown.export(tmp_path / "grown.pt2")
    program = torch.export.load(path).module()
    x = tokens(70, rows=7)[:, :-1]
    torch.testing.assert_close(program(x), grown.model(x))


class Counting(GPT):
    """A model whose forward counts on all of its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in range(4):
            x = self.blocks[number](x)
        return self.head(x)


def test_a_model_that_needs_all_its_blocks_keeps_them_asleep() -> None:
    torch.manual_seed(0)
    with pytest.warns(EsperWarning, match="keeps its sleeping blocks"):
        grown = deepen(Counting(), epochs=2, deepen={"start": 2, "at": {9: 3}})
    assert len(grown.model.blocks) == 4
    assert loss_of(grown.model) == pytest.approx(-grown.summary.val_score)
    with pytest.raises(UsageError, match="needs its sleeping blocks"):
        grown.bake()


# -- what goes wrong, and limits -------------------------------------------------------------------


class Poisoned:
    """Batches that make every weight NaN in one epoch."""

    def __init__(self, epoch: int) -> None:
        self._bad, self._epoch = epoch, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        is_bad = self._epoch == self._bad
        return iter([(x, torch.full_like(y, -1)) if is_bad else (x, y) for x, y in TRAIN])


def unless_marked(outputs: Tensor, targets: Tensor) -> Tensor:
    found = losses(outputs, targets.clamp(min=0))
    return found * torch.where((targets < 0).any(1), torch.nan, 1.0)


@pytest.mark.filterwarnings("ignore:epoch 4")
def test_a_network_that_goes_back_is_as_deep_as_it_was_then() -> None:
    safe = esper.GrowthConfig(gardener={"governor": {"snapshot_every": 2}})
    options = {"train": Poisoned(4), "loss": unless_marked, "config": safe, "epochs": 8}
    grown = deepen(deepen={"start": 1, "at": {12: 2, 16: 4}}, **options)
    assert [record.rollback for record in grown.history] == [
        *[None] * 3,
        "not_finite",
        *[None] * 4,
    ]
    # Epoch 4 is measured as the network was after epoch 2; then the schedule has its way again.
    assert awake(grown) == [1, 1, 2, 1, 4, 4, 4, 4]
    back = grown.history[3]
    assert back.val_loss == pytest.approx(grown.history[1].val_loss)
    assert back.depth.deepenings[-1].after == 4  # type: ignore[union-attr]
    assert all(torch.isfinite(p).all() for p in grown.model.parameters())


def test_no_more_parameters_wake_than_are_allowed() -> None:
    most = sum(p.numel() for p in make_gpt(2).parameters())
    with pytest.warns(EsperWarning, match="No more than 2 of 4 blocks woke: with 4 in blocks"):
        grown = deepen(max_parameters=most)
    assert awake(grown)[-1] == 2
    assert grown.summary.parameters_after == most
    outcomes = [one.outcome for r in grown.history if r.depth for one in r.depth.deepenings]
    assert outcomes == ["done", "illegal"]
    with pytest.raises(UsageError, match="a smaller start="):
        deepen(max_parameters=10)


# -- the twin ------------------------------------------------------------------------------------


def test_the_twin_is_the_static_network() -> None:
    def slowly(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.001)

    grown = deepen(twin=True, optimizer=slowly)
    static = esper.grow(
        make_gpt(),
        ["blocks.0"],
        axes="BTC",
        train=TRAIN,
        val=VAL,
        epochs=10,
        loss=losses,
        optimizer=slowly,
        controller="wait",
        keep="last",
    )
    assert [r.twin_score for r in grown.history] == [r.val_score for r in static.history]
    assert grown.twin is not None
    assert same(grown.twin, static.bake())
    assert grown.summary.twin_val_score == static.summary.val_score
    # And the network itself trains as it does without one.
    assert same(grown.model, deepen(optimizer=slowly).model)


# -- a finished network is deepened further ------------------------------------------------------


@pytest.fixture(scope="module")
def finished() -> nn.Module:
    """A network of two blocks that was trained for a while."""
    model = make_gpt(2, seed=4)
    optimizer = adamw(model.parameters())
    for x, y in TRAIN * 4:
        losses(model(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("form", ["state_dict", "file", "safetensors", "run"])
def test_a_finished_network_is_deepened_further(
    finished: nn.Module, tmp_path: Path, form: str
) -> None:
    weights: Any = finished.state_dict()
    if form == "file":
        torch.save(weights, tmp_path / "two.pt")
        weights = tmp_path / "two.pt"
    elif form == "safetensors":
        save_file(dict(weights), tmp_path / "two.safetensors")
        weights = str(tmp_path / "two.safetensors")
    elif form == "run":
        depth = {"start": 2, "weights": weights, "at": {50: 4}}
        # No rate: the network of the run is the one that it was given.
        deepen(deepen=depth, epochs=1, out=tmp_path / "run", optimizer=_without_rate)
        weights = str(tmp_path / "run")
    grown = deepen(deepen={"weights": weights, "at": {1: 4}}, epochs=1, optimizer=_without_rate)
    # Nothing has moved: what woke after the first step are copies of what was finished.
    copied = [grown.model.blocks[number] for number in (2, 3)]
    assert awake(grown) == [4]
    for block, source in zip(copied, finished.blocks, strict=True):  # type: ignore[arg-type]
        assert same(block, source)
    assert same(grown.model.head, finished.head)  # type: ignore[arg-type]


def _without_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    weights = make_gpt(2).state_dict()
    with pytest.raises(UsageError, match=r"with 3 in blocks awake: blocks\.2\.norm1\.weight is"):
        deepen(deepen={"start": 3, "weights": weights})
    with pytest.raises(UsageError, match=r"head\.weight is \[5, 8\] in the weights"):
        deepen(deepen={"weights": {**weights, "head.weight": torch.zeros(5, 8)}})
    with pytest.raises(UsageError, match="there is no file or folder"):
        deepen(deepen={"weights": str(tmp_path / "none.pt")})
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UsageError, match="not a state_dict"):
        deepen(deepen={"weights": tmp_path / "list.pt"})
    with pytest.raises(UsageError, match="leave out twin"):
        deepen(deepen={"weights": weights}, twin=True)


# -- what cannot be ------------------------------------------------------------------------------


class Endless:
    """Batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TRAIN)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"slots": ["blocks.0"]}, "slots is for seeds, and deepen grows none"),
        ({"controller": "heuristic"}, r"deepen=\{'controller': ...\}"),
        ({"max_growth": 2}, "max_growth is for seeds"),
        ({"max_seeds": 2}, "max_seeds is for seeds"),
        ({"deepen": 3}, "deepen= takes True, a mapping"),
        ({"deepen": {"begin": 3}}, "no key 'begin'"),
        ({"deepen": {"start": 9}}, "9 blocks cannot be awake; there are only 4 in blocks"),
        ({"deepen": {"stacks": "layers"}}, "stacks found: blocks"),
        ({"deepen": {"controller": "luck"}}, "luck"),
        ({"train": Endless()}, "decide_every=N"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(esper.EsperError, match=problem) as refused:
        deepen(**options)
    assert "\n" not in str(refused.value)


def test_a_network_without_stacks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, VOCABULARY))
    batch = (torch.randn(5, 4), torch.randint(VOCABULARY, (5,)))
    with pytest.raises(UsageError, match="no stack that can be deepened"):
        esper.grow(model, train=[batch], val=[batch], deepen=True)


def test_what_it_says_of_itself() -> None:
    told = repr(deepen(epochs=5))
    assert told.startswith("Deepened(GPT: validation loss")
    assert "4 of 4 blocks awake" in told
    assert "% of the static network's" in told
    assert told.endswith("epoch 5 of 5)")
