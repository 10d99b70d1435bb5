"""Deepen in plain loops, compared with networks that are made deeper by hand."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import esper
from esper.growth.depth.deepen import Deepen
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from tests.growth.depth.models import (
    Block,
    image_loss,
    images,
    make_gpt,
    make_resnet,
    text_loss,
    tokens,
    train,
)

STEPS = 20
EXAMPLE = tokens(0)[:, :-1]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for b in model.blocks for p in b.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def state_of(model: nn.Module, optimizers: Any) -> dict[str, Tensor]:
    """All weights and moments of a model, by name."""
    found = dict(model.state_dict())
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"{name}/{key}"] = value
    return found


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def deepen_by_hand(layers: list[tuple[int, int]], factory: Any, order: str = "stack") -> Any:
    """Train a GPT whose list of blocks is really short at first; `layers` is [(step, blocks), …].

    A new model and a new optimizer are made at each growth, and filled by hand.
    """
    full = make_gpt(layers[-1][1])
    small, losses = make_gpt(layers[-1][1]), []
    small.blocks = small.blocks[: layers[0][1]]
    optimizers = factory(small)
    for (start, count), (stop, _) in zip(layers, [*layers[1:], (STEPS, 0)], strict=True):
        if start:
            before = state_of(small, optimizers)
            had = len(small.blocks)
            small = copy.deepcopy(full)
            small.blocks = small.blocks[:count]
            optimizers = factory(small)
            text_loss(small, 0).backward()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()
            for name, value in state_of(small, optimizers).items():
                part = name.split(".")
                if part[0] == "blocks":
                    own = int(part[1])
                    part[1] = str(own % had if order == "stack" else own * had // count)
                with torch.no_grad():
                    value.copy_(before[".".join(part)])
        losses += train(small, optimizers, start, stop)
    return losses, state_of(small, optimizers)


@pytest.mark.parametrize("factory", [adamw, sgd, muon, grouped])
def test_it_is_the_same_to_the_bit_as_a_short_network_made_deeper_by_hand(factory: Any) -> None:
    expected, weights = deepen_by_hand([(0, 2), (4, 4), (8, 8)], factory)
    model = make_gpt(8)
    optimizers = factory(model)
    depth = Deepen(model, optimizers, total_steps=STEPS)
    assert train(model, optimizers, 0, STEPS, depth=depth) == expected
    check_equal(state_of(model, optimizers), weights)
    assert depth.awake == depth.blocks == {"blocks": 8}
    assert [event["step"] for event in depth.history] == [4, 8]


def test_copies_may_be_interleaved() -> None:
    expected, weights = deepen_by_hand([(0, 2), (5, 3), (9, 6)], adamw, "interleave")
    model = make_gpt(6)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, start=2, at={5: 3, 9: 6}, order="interleave")
    assert train(model, optimizer, 0, STEPS, depth=depth) == expected
    check_equal(state_of(model, optimizer), weights)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": False}])
def test_the_optimizer_state_of_copies_is_their_own(options: dict[str, Any]) -> None:
    model = make_gpt(4)
    optimizer = adamw(model, **options)
    depth = Deepen(model, optimizer, start=2, at={3: 4})
    train(model, optimizer, 0, 3, depth=depth)
    one, other = (optimizer.state[model.blocks[n].out.weight] for n in (0, 2))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(one[key], other[key])
        assert one[key] is not other[key]
    train(model, optimizer, 3, 4, depth=depth)
    # A shared counter would have been counted up twice.
    assert float(one["step"]) == float(other["step"]) == 4


def test_sleeping_blocks_are_not_trained_and_keep_their_names() -> None:
    model = make_gpt(4)
    optimizer = adamw(model, weight_decay=0.1)
    keys, before = list(model.state_dict()), copy.deepcopy(model.blocks[1:].state_dict())
    depth = Deepen(model, optimizer, total_steps=1000)
    train(model, optimizer, 0, 5, depth=depth)
    assert depth.awake == {"blocks": 1}
    check_equal(model.blocks[1:].state_dict(), before)
    assert all(p.grad is None and p not in optimizer.state for p in model.blocks[1:].parameters())
    assert list(model.state_dict()) == keys
    # It computes what a network of one block does.
    short = make_gpt(4)
    short.load_state_dict(model.state_dict())
    short.blocks = short.blocks[:1]
    assert torch.equal(model(EXAMPLE), short(EXAMPLE))


def test_nothing_is_left_in_the_model_at_the_end() -> None:
    model, fresh = make_gpt(4), make_gpt(4)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, total_steps=10)
    train(model, optimizer, 0, 10, depth=depth)
    assert depth.is_finished
    for one, other in zip(model.modules(), fresh.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert not one._forward_pre_hooks
        assert not one._forward_hooks
        assert all(p.requires_grad for p in one.parameters())


def test_a_model_with_sleeping_blocks_can_be_copied_and_pickled() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, total_steps=100)
    # Before the first batch as well, while a hook waits for it.
    early = pickle.loads(pickle.dumps(model))
    assert torch.equal(early(EXAMPLE), make_gpt(4)(EXAMPLE))
    train(model, optimizer, 0, 2, depth=depth)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(EXAMPLE), model(EXAMPLE))
        # Another run may go on with it.
        again = Deepen(twin, adamw(twin), start=4, total_steps=3, example=EXAMPLE)
        assert again.awake == {"blocks": 4}
        assert "forward" not in vars(twin.blocks[3])


def test_finding_and_counting_leave_no_trace() -> None:
    model, other = make_resnet(), make_resnet()
    state = torch.get_rng_state()
    Deepen(model, sgd(model), total_steps=10, example=images(0)[0])
    assert torch.equal(torch.get_rng_state(), state)
    check_equal(model.state_dict(), other.state_dict())
    assert all(p.grad is None for p in model.parameters())
    assert all(part.training for part in model.modules())


def test_several_stacks_grow_together_with_their_running_statistics() -> None:
    model = make_resnet()
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, total_steps=STEPS)
    train(model, optimizer, 0, 4, depth=depth, loss_of=image_loss)
    # The first block of the second stage has a stride, and is always awake.
    assert depth.blocks == {"stage1": 4, "stage2": 3}
    assert depth.awake == {"stage1": 2, "stage2": 2}
    for stage, one, other in (("stage1", 0, 1), ("stage2", 1, 2)):
        blocks = model.get_submodule(stage)
        check_equal(blocks[one].state_dict(), blocks[other].state_dict())
        assert int(blocks[other].norm.num_batches_tracked) == 4
    train(model, optimizer, 4, STEPS, depth=depth, loss_of=image_loss)
    assert depth.awake == depth.blocks


def test_stacks_may_be_chosen() -> None:
    model = make_resnet()
    depth = Deepen(
        model, sgd(model), stacks=["stage2"], total_steps=9, start=2, example=images(0)[0]
    )
    assert depth.awake == {"stage2": 2}
    model = make_resnet()
    depth = Deepen(model, sgd(model), start={"stage1": 2}, total_steps=9, example=images(0)[0])
    assert depth.awake == {"stage1": 2, "stage2": 3}


# -- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "start", "expected"),
    [
        (12, None, {200: 6, 400: 12}),
        (4, None, {200: 2, 400: 4}),
        (10, None, {200: 6, 400: 10}),
        (2, None, {400: 2}),
        (8, 1, {133: 2, 267: 4, 400: 8}),
        (4, 4, {}),
    ],
)
def test_blocks_double_until_all_are_awake(
    layers: int, start: int | None, expected: dict[int, int]
) -> None:
    model = make_gpt(layers)
    depth = Deepen(model, sgd(model), start=start, total_steps=1000, example=EXAMPLE)
    for _ in range(1000):
        depth.step()
    assert {event["step"]: event["awake"]["blocks"] for event in depth.history} == expected
    assert depth.is_finished


def test_a_run_that_goes_on_under_another_schedule_catches_up() -> None:
    model = make_gpt(8)
    depth = Deepen(model, sgd(model), total_steps=100, example=EXAMPLE)
    for _ in range(15):
        depth.step()
    assert depth.awake == {"blocks": 2}
    saved = depth.state_dict()
    # Shorter: its first doubling should have been at step 10. Longer: the same later.
    for total_steps, expected in ((50, {16: 4, 20: 8}), (200, {40: 4, 80: 8})):
        model = make_gpt(8)
        again = Deepen(model, sgd(model), total_steps=total_steps, example=EXAMPLE)
        again.load_state_dict(saved)
        for _ in range(total_steps - 15):
            again.step()
        assert {e["step"]: e["awake"]["blocks"] for e in again.history} == expected
    # One that is behind what is awake waits until it is not.
    model = make_gpt(8)
    again = Deepen(model, sgd(model), at={16: 1, 18: 4}, example=EXAMPLE, start=1)
    again.load_state_dict(saved)
    for _ in range(5):
        again.step()
    assert [event["step"] for event in again.history] == [18]
    assert again.is_finished


def test_a_budget_buys_steps() -> None:
    model = make_gpt(8)
    depth = Deepen(model, sgd(model), example=EXAMPLE)
    steps = depth.steps_for(1e9)
    depth.total_steps = steps
    for _ in range(steps):
        depth.step()
    assert depth.awake == {"blocks": 8}
    assert 0.999e9 < depth.flops <= 1e9
    # A schedule in steps stays where it is, however long the run.
    model = make_gpt(8)
    depth = Deepen(model, sgd(model), start=4, at={10: 8}, example=EXAMPLE)
    whole, half = depth.steps_for(1e9), depth.steps_for(1e9 / 2)
    for _ in range(whole):
        depth.step()
    assert depth.flops <= 1e9
    assert whole > half


def test_a_controller_of_ones_own_decides_and_is_saved() -> None:
    class Mine:
        calls = 0

        def __call__(self, progress: esper.growth.depth.rules.Progress) -> int | None:
            self.calls += 1
            return 3 if progress.step == 2 else None

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    model = make_gpt(4)
    optimizer, mine = adamw(model), Mine()
    depth = Deepen(model, optimizer, controller=mine)
    train(model, optimizer, 0, 5, depth=depth)
    assert depth.awake == {"blocks": 3}
    other = Mine()
    model = make_gpt(4)
    again = Deepen(model, adamw(model), controller=other, example=EXAMPLE)
    again.load_state_dict(depth.state_dict())
    assert other.calls == 5
    assert again.awake == {"blocks": 3}


@pytest.mark.parametrize("controller", ["plateau", "slope"])
def test_rules_that_watch_the_loss_wake_all_blocks_by_sixty_percent(controller: str) -> None:
    model = make_gpt(4)
    depth = Deepen(model, sgd(model), controller=controller, total_steps=200, example=EXAMPLE)
    for step in range(200):
        depth.step(torch.tensor(2.0 - step / 200))
    assert depth.awake == {"blocks": 4}
    assert [event["step"] for event in depth.history] == [60, 120]
    # On a plateau they do not wait so long.
    model = make_gpt(4)
    depth = Deepen(model, sgd(model), controller=controller, total_steps=200, example=EXAMPLE)
    for step in range(200):
        depth.step(max(1.0, 3.0 - step / 10))
    assert depth.history[-1]["step"] < 100


# -- resuming -------------------------------------------------------------------------------------

PROGRAM = """
import os
import sys
from tests.growth.depth.test_deepen import *
torch.set_num_threads(int(os.environ["ESPER_THREADS"]))
run = Run()
run.load(sys.argv[1])
run.train(STEPS)
run.save(sys.argv[2])
"""


class Run:
    """A run with all that has a state of its own."""

    def __init__(self) -> None:
        self.step, model = 0, make_gpt(8, dropout=0.1)
        optimizer = adamw(model)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        depth = Deepen(model, optimizer, total_steps=STEPS, ema=average)
        self.parts = {
            **{"model": model, "optimizer": optimizer, "depth": depth},
            **{"scheduler": scheduler, "average": average},
        }

    def train(self, last: int) -> None:
        for step in range(self.step, last):
            train(self.parts["model"], self.parts["optimizer"], step, step + 1)
            self.parts["scheduler"].step()
            self.parts["average"].update_parameters(self.parts["model"])
            self.parts["depth"].step()
        self.step = last

    def save(self, path: Any) -> Any:
        saved = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({**saved, "step": self.step, "rng": torch.get_rng_state()}, path)
        return torch.load(path, weights_only=True)

    def load(self, path: Any) -> None:
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.step = saved["step"]
        torch.set_rng_state(saved["rng"])


def test_a_resumed_run_is_the_same_to_the_bit_in_a_fresh_process(tmp_path: Path) -> None:
    run = Run()
    run.train(6)
    middle = run.save(tmp_path / "middle")
    assert middle["depth"]["awake"] == {"blocks": 4}
    run.train(STEPS)
    whole = run.save(tmp_path / "whole")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "middle"), str(tmp_path / "resumed")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    resumed = torch.load(tmp_path / "resumed", weights_only=True)
    assert resumed["depth"]["awake"] == {"blocks": 8}
    flat = [torch.utils._pytree.tree_flatten_with_path(one)[0] for one in (whole, resumed)]
    for (path, one), (_, other) in zip(*flat, strict=True):
        equal = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert equal, path


def test_a_state_is_plain_data_and_of_one_model() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, total_steps=10)
    assert depth.state_dict()["step"] == 0
    train(model, optimizer, 0, 3, depth=depth)
    buffer = io.BytesIO()
    torch.save(depth.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = make_gpt(8)
    with pytest.raises(CheckpointError, match=r"a model with blocks \{'blocks': 4\}"):
        Deepen(other, adamw(other), total_steps=10, example=EXAMPLE).load_state_dict(saved)
    # It waits for the first batch where stacks are not known yet.
    same = make_gpt(4)
    again = Deepen(same, adamw(same), total_steps=10)
    again.load_state_dict(saved)
    assert again.state_dict() == saved
    same.eval()(EXAMPLE)
    assert again.awake == {"blocks": 2}
    assert again.flops == depth.flops


# -- with what else happens to a model ------------------------------------------------------------


def test_an_average_is_deepened_along() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    depth = Deepen(model, optimizer, start=2, at={3: 4}, ema=average)
    for step in range(3):
        train(model, optimizer, step, step + 1)
        average.update_parameters(model)
        depth.step()
    for one, other in ((0, 2), (1, 3)):
        blocks = average.module.blocks
        check_equal(blocks[one].state_dict(), blocks[other].state_dict())
        assert not torch.equal(blocks[one].out.weight, model.blocks[one].out.weight)
    assert not any(part._forward_pre_hooks for part in average.modules())
    assert "forward" not in vars(average.module.blocks[3])


def test_an_average_made_while_blocks_sleep_follows_too() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    average = copy.deepcopy(model)
    depth = Deepen(model, optimizer, start=2, at={3: 4}, ema=[average], example=EXAMPLE)
    with torch.no_grad():
        assert torch.equal(average(EXAMPLE), model(EXAMPLE))
    with pytest.raises(UsageError, match=r"GPT has no block blocks\.2; give ema= copies"):
        Deepen(other := make_gpt(4), adamw(other), ema=make_gpt(2), example=EXAMPLE)
    assert depth.awake == {"blocks": 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=11),
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
    ],
    ids=["lambda", "one cycle", "cosine"],
)
def test_schedulers_of_the_learning_rate_are_not_affected(make: Any) -> None:
    rates = []
    for is_deepened in (True, False):
        model = make_gpt(4)
        optimizer = adamw(model)
        scheduler = make(optimizer)
        depth = Deepen(model, optimizer, total_steps=10) if is_deepened else None
        found = []
        for step in range(10):
            train(model, optimizer, step, step + 1, depth=depth)
            scheduler.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        rates.append(found)
    assert rates[0] == rates[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    losses = []
    for is_checkpointed in (False, True):
        model = make_gpt(4, dropout=0.2)
        if is_checkpointed:
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
        optimizer = adamw(model)
        depth = Deepen(model, optimizer, total_steps=10)
        torch.manual_seed(1)
        losses.append(train(model, optimizer, 0, 10, depth=depth))
        assert depth.is_finished
    assert losses[0] == losses[1]


def test_autocast_with_accumulation() -> None:
    def run(layers: int, **options: Any) -> list[float]:
        model = make_gpt(layers)
        optimizer = adamw(model)
        depth = Deepen(model, optimizer, total_steps=10, batches_per_step=2, **options)
        losses = []
        for step in range(10):
            for part in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = text_loss(model, 2 * step + part)
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            depth.step()
            losses.append(loss.item())
        assert depth.is_finished
        assert depth.awake == depth.blocks
        assert all(torch.isfinite(p).all() for p in model.parameters())
        return losses

    assert run(4) == run(4, example=EXAMPLE)


@pytest.mark.parametrize(
    "how",
    [
        "blocks",
        pytest.param("whole", marks=pytest.mark.slow),
        pytest.param("in place", marks=pytest.mark.slow),
    ],
)
# PyTorch's compiler looks at gradients of inner tensors, and silences this outside of tests.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_compute_the_same(how: str) -> None:
    """Compared loosely: a compiled graph may order operations otherwise."""
    torch._dynamo.reset()
    model = make_gpt(4)
    called: Any = model
    if how == "whole":
        called = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        for block in model.blocks:
            block.compile(backend="eager")
    optimizer = adamw(model)
    depth = Deepen(called, optimizer, total_steps=10)
    losses = train(called, optimizer, 0, 10, depth=depth)
    plain = make_gpt(4)
    optimizer = adamw(plain)
    expected = train(plain, optimizer, 0, 10, depth=Deepen(plain, optimizer, total_steps=10))
    assert losses == pytest.approx(expected, rel=1e-3)
    assert depth.history[-1]["step"] == 4
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_finished_checkpoint_is_deepened_further() -> None:
    small = make_gpt(3, seed=1)
    saved = small.state_dict()
    model = make_gpt(12)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, start=3, total_steps=10, example=EXAMPLE)
    with depth.export():
        model.load_state_dict(saved)
    assert torch.equal(model(EXAMPLE), small(EXAMPLE))
    train(model, optimizer, 0, 10, depth=depth)
    assert depth.awake == {"blocks": 12}


def test_exporting_writes_the_network_that_is_awake() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, total_steps=10)
    train(model, optimizer, 0, 3, depth=depth)
    with depth.export():
        saved = copy.deepcopy(model.state_dict())
        inside = model(EXAMPLE)
    small = make_gpt(2)
    small.load_state_dict(saved)
    assert torch.equal(small(EXAMPLE), model(EXAMPLE))
    assert torch.equal(inside, model(EXAMPLE))
    assert len(model.blocks) == 4


# -- refusals -------------------------------------------------------------------------------------


def refused(problem: str, make: Any = make_gpt, **options: Any) -> None:
    model = make()
    given = {"total_steps": 10, "example": EXAMPLE, "optimizer": adamw(model), **options}
    with pytest.raises((UsageError, KeyError), match=problem):
        Deepen(model, **given)


class Wide(Block):
    """Another class of blocks in the same list."""


def test_two_stacks_of_one_list_are_exported_and_shortened() -> None:
    model = make_gpt(0)
    model.blocks = nn.ModuleList([*(Block() for _ in range(4)), *(Wide() for _ in range(4))])
    depth = Deepen(model, adamw(model), start=2, at={5: 4}, example=EXAMPLE)
    assert depth.awake == {"blocks[0:4]": 2, "blocks[4:8]": 2}
    asleep = model(EXAMPLE)
    with depth.export():
        assert [type(block) for block in model.blocks] == [Block, Block, Wide, Wide]
        assert torch.equal(model(EXAMPLE), asleep)
    assert len(model.blocks) == 8
    put_back = depth.shorten()
    assert torch.equal(model(EXAMPLE), asleep)
    assert len(model.blocks) == 4
    assert not any("forward" in vars(module) for module in model.modules())
    put_back()
    assert len(model.blocks) == 8
    assert torch.equal(model(EXAMPLE), asleep)


def test_a_step_has_two_halves_and_a_network_can_go_back() -> None:
    model = make_gpt()
    depth = Deepen(model, adamw(model), start=1, at={2: 2, 3: 4}, example=EXAMPLE)
    depth.count()
    depth.decide()
    depth.count()
    assert depth.awake == {"blocks": 1}
    depth.decide()
    depth.decide()
    assert depth.awake == {"blocks": 2}
    depth.step()
    assert (depth.awake, depth.is_finished) == ({"blocks": 4}, True)
    spent = depth.flops
    depth.go_back({"blocks": 1})
    assert (depth.awake, depth.flops, depth.is_finished) == ({"blocks": 1}, spent, False)
    depth.step()
    # What the schedule has awake by now.
    assert (depth.awake, depth.steps) == ({"blocks": 4}, 4)
    assert depth.static_flops == 4 * (depth.flops - spent) * _cost(4) / _cost(1)


def test_a_network_that_goes_back_counts_its_windows_anew() -> None:
    seen: list[int] = []

    def watch(progress: esper.growth.depth.rules.Progress) -> None:
        seen.append(progress.windows_since_growth)

    model = make_gpt(4)
    # A window is one step of a hundred.
    depth = Deepen(model, sgd(model), controller=watch, total_steps=100, example=EXAMPLE)
    for _ in range(3):
        depth.step(1.0)
    depth.go_back(depth.awake)
    depth.step(1.0)
    assert seen == [1, 2, 3, 1]


def _cost(blocks: int) -> int:
    return esper.count_flops(make_gpt(blocks), EXAMPLE).total


def test_a_limit_of_parameters_ends_the_growth() -> None:
    model = make_gpt()
    most = sum(parameter.numel() for parameter in make_gpt(3).parameters())
    depth = Deepen(
        model, adamw(model), start=1, at={1: 2, 2: 4}, example=EXAMPLE, max_parameters=most
    )
    for _ in range(3):
        depth.step()
    assert depth.awake == {"blocks": 2}
    assert depth.count_parameters() < most < depth.count_parameters(depth.blocks)
    assert f"max_parameters={most:,}" in depth.refused
    state = depth.state_dict()
    again = Deepen(other := make_gpt(), adamw(other), at={1: 2, 2: 4}, example=EXAMPLE)
    again.load_state_dict(state)
    assert (again.refused, again.is_finished) == (depth.refused, True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"order": "shuffle"}, "unknown order 'shuffle'.*stack"),
        ({"controller": "magic"}, "unknown depth controller 'magic'"),
        ({"controller": 3}, "got a int"),
        ({"controller": "slope", "at": {3: 4}}, "at= needs controller='schedule'"),
        ({"controller": "plateau", "total_steps": None}, "needs the length of the run"),
        ({"total_steps": 0}, r"got 0; write total_steps=epochs \* len\(loader\)"),
        ({"at": {0.2: 4}}, r"whole steps from 1, got 0\.2"),
        ({"start": 5}, "5 blocks cannot be awake; there are only 4 in blocks"),
        ({"start": 0}, "0 blocks of blocks cannot be awake, only 1 to 4"),
        ({"start": 2, "at": {3: 1}}, "only 2 to 4"),
        ({"start": {"layers": 1}}, "unknown stack 'layers'"),
        ({"stacks": ["layers"]}, "'layers' cannot be deepened.*stacks found: blocks"),
        ({"example": torch.zeros(2, 3)}, r"cannot take the example .*\[2, 3\]"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], problem: str) -> None:
    refused(problem, **options)


def test_an_optimizer_must_hold_all_blocks() -> None:
    model = make_gpt(4)
    refused(
        r"lacks blocks\.2\.norm1\.weight; make it from all of model\.parameters\(\)",
        lambda: model,
        optimizer=torch.optim.SGD([*model.embed.parameters(), *model.blocks[:2].parameters()], 0.1),
    )
    # What is frozen needs no optimizer.
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    Deepen(model, torch.optim.SGD(trained, 0.1), total_steps=3, example=EXAMPLE)


def test_a_model_that_is_never_called_is_said() -> None:
    model = make_gpt(4)
    depth = Deepen(model, adamw(model), total_steps=5)
    with pytest.raises(UsageError, match=r"depth\.awake needs a first batch"):
        depth.awake  # noqa: B018
    with pytest.raises(UsageError, match=r"was not called before depth\.step\(\)"):
        depth.step()


def test_a_loop_that_forgets_depth_step_is_warned_once() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    depth = Deepen(model, optimizer, total_steps=10, example=EXAMPLE)
    # Blocks would first wake after two steps, and `depth.step()` follows the optimizer's.
    optimizer.step()
    optimizer.step()
    with pytest.warns(EsperWarning, match=r"call depth\.step\(\) after each"):
        optimizer.step()
    optimizer.step()
    assert depth.awake == {"blocks": 1}


def test_a_run_longer_than_total_steps_is_warned_once() -> None:
    def deepened(**options: Any) -> Deepen:
        model = make_gpt(4)
        return Deepen(model, adamw(model), example=EXAMPLE, **options)

    depth = deepened(total_steps=10)
    for _ in range(10):
        depth.step()
    with pytest.warns(EsperWarning, match=r"counts step 11, but total_steps=10, .*epochs \* batch"):
        depth.step()
    depth.step()
    # Here the length of the run decides nothing.
    depth = deepened(total_steps=2, start=1, at={1: 4})
    for _ in range(4):
        depth.step()


def test_trained_blocks_that_sleep_are_named_at_the_first_step() -> None:
    model = make_gpt(4)
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    depth = Deepen(model, optimizer, start=2, total_steps=10)
    with pytest.warns(EsperWarning, match=r"^blocks\.2 to blocks\.3 sleep .*depth\.load_state"):
        train(model, optimizer, 1, 2, depth=depth)
    train(model, optimizer, 2, 3, depth=depth)
    # The same if the optimizer's state comes after Deepen.
    model = make_gpt(4)
    depth = Deepen(model, optimizer := adamw(model), start=3, total_steps=10)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with pytest.warns(EsperWarning, match=r"^blocks\.3 sleep"):
        train(model, optimizer, 1, 2, depth=depth)


def test_a_resumed_run_or_a_new_optimizer_is_not_said_to_lose_training() -> None:
    model = make_gpt(4)
    depth = Deepen(model, optimizer := adamw(model), total_steps=10)
    train(model, optimizer, 0, 3, depth=depth)
    # A quarter was awake at first, and now two blocks are.
    again = Deepen(model, optimizer, total_steps=10)
    again.load_state_dict(depth.state_dict())
    train(model, optimizer, 3, 4, depth=again)
    # This one makes the state of all parameters before its first step.
    model = make_gpt(4)
    optimizer = torch.optim.Adagrad(model.parameters())
    train(model, optimizer, 0, 2, depth=Deepen(model, optimizer, total_steps=10))


def test_a_model_can_be_deepened_anew_before_its_first_batch() -> None:
    model = make_gpt(4)
    first = Deepen(model, adamw(model), total_steps=10)
    second = Deepen(model, adamw(model), start=2, total_steps=10)
    model(EXAMPLE)
    second.step()
    assert second.awake == {"blocks": 2}
    with pytest.raises(UsageError, match="was not called"):
        first.step()


def test_the_length_of_the_run_is_needed() -> None:
    model = make_gpt(4)
    depth = Deepen(model, adamw(model), example=EXAMPLE)
    with pytest.raises(UsageError, match="total_steps=N"):
        depth.step()
    with pytest.raises(UsageError, match="before the first step only, and 1 are done"):
        depth.total_steps = 3
    model = make_gpt(4)
    depth = Deepen(model, adamw(model), controller="slope", total_steps=9, example=EXAMPLE)
    with pytest.raises(UsageError, match=r"needs the training loss, and no step of the last 1 %"):
        depth.step()


def test_what_it_says_of_itself() -> None:
    model = make_gpt(4)
    depth = Deepen(model, optimizer := adamw(model), total_steps=10)
    assert repr(depth) == "Deepen(stacks='auto', found on the first batch)"
    train(model, optimizer, 0, 3, depth=depth)
    part = (depth.flops, depth.static_flops, 1 - depth.flops / depth.static_flops)
    assert str(depth).splitlines() == [
        "Deepen: 3 of 10 optimizer steps; the last blocks wake at step 4",
        "  blocks: 2 of 4 blocks awake (1 at first, 2 from step 2)",
        "  training FLOPs: {:.3g}; with all blocks awake from the start {:.3g}, "
        "{:.0%} saved".format(*part),
    ]
    again = Deepen(other := make_gpt(4), adamw(other), total_steps=10)
    again.load_state_dict(depth.state_dict())
    assert repr(again) == (
        "Deepen(stacks='auto', found on the first batch; goes on after step 3 with blocks: "
        "2 of 4 blocks awake)"
    )


def test_when_the_last_blocks_wake_is_said() -> None:
    def first_line(**options: Any) -> str:
        model = make_gpt(4)
        return repr(Deepen(model, adamw(model), example=EXAMPLE, **options)).splitlines()[0]

    assert first_line() == "Deepen: 0 optimizer steps"
    begun = "Deepen: 0 of 4,000 optimizer steps; the last blocks wake"
    assert first_line(total_steps=4_000) == f"{begun} at step 1,600"
    assert first_line(total_steps=4_000, controller="plateau") == f"{begun} by step 2,400"
    last = "Deepen: 0 optimizer steps; the last blocks wake at step 1"
    assert first_line(start=1, at={1: 4}) == last


@pytest.mark.parametrize(
    ("total_steps", "got"),
    [
        ("20", "'20'"),
        (20.5, r"20\.5"),
        (True, "True"),
        (-1, "-1"),
        ((n for n in range(3)), "a generator"),
        ([1], "a list"),
    ],
)
def test_a_length_that_is_no_number_of_steps_is_refused(total_steps: Any, got: str) -> None:
    refused(rf"of the whole run, got {got}; write total_steps=epochs \*", total_steps=total_steps)


def test_a_model_and_an_optimizer_in_the_wrong_order_are_refused() -> None:
    model = make_gpt(4)
    with pytest.raises(UsageError, match=r"got AdamW; write Deepen\(model, optimizer, total_st"):
        Deepen(adamw(model), model, total_steps=10)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer .*, got GPT"):
        Deepen(model, model, total_steps=10)  # type: ignore[arg-type]


def test_resuming_past_the_end_is_warned() -> None:
    model = make_gpt(4)
    depth = Deepen(model, adamw(model), total_steps=100, example=EXAMPLE)
    for _ in range(15):
        depth.step()
    saved = depth.state_dict()
    for example in (EXAMPLE, None):
        model = make_gpt(4)
        again = Deepen(model, adamw(model), total_steps=10, example=example)
        with pytest.warns(EsperWarning, match=r"saved after step 15, but total_steps=10, so all"):
            again.load_state_dict(saved)
        model(EXAMPLE)
        again.step()
        assert again.awake == {"blocks": 4}
    # A run that had ended is no mistake, nor one whose length decides nothing.
    for options in ({"total_steps": 15}, {"total_steps": 2, "start": 1, "at": {20: 4}}):
        model = make_gpt(4)
        Deepen(model, adamw(model), example=EXAMPLE, **options).load_state_dict(saved)


@pytest.mark.parametrize("controller", ["plateau", "slope"])
def test_losses_that_are_not_finite_are_said_once(controller: str) -> None:
    model = make_gpt(4)
    depth = Deepen(model, sgd(model), controller=controller, total_steps=200, example=EXAMPLE)
    depth.step(float("nan"))
    with pytest.warns(EsperWarning, match=r"is nan, so the controller cannot .* by 60% of the run"):
        depth.step(1.0)
    for _ in range(198):
        depth.step(float("inf"))
    assert [event["step"] for event in depth.history] == [60, 120]
