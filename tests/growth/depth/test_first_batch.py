from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.depth.deepen import Deepen
from esper.growth.depth.first_batch import FirstBatch, unhook
from esper.leyline.errors import UsageError
from tests.growth.depth.models import GPT, make_gpt, text_loss, tokens, train

EXAMPLE = tokens(0)[:, :-1]


class Task(nn.Module):
    """A module whose `forward` nobody calls, as that of a trainer may be."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_gpt(4)

    def training_step(self, step: int) -> Tensor:
        return text_loss(self.net, step)


def test_a_part_of_the_model_may_be_what_is_called() -> None:
    task = Task()
    optimizer = torch.optim.AdamW(task.parameters(), 0.01)
    depth = Deepen(task, optimizer, total_steps=10)
    train(
        task, optimizer, 0, 10, depth=depth, loss_of=lambda model, step: model.training_step(step)
    )
    assert depth.blocks == depth.awake == {"net.blocks": 4}
    alone = make_gpt(4)
    optimizer = torch.optim.AdamW(alone.parameters(), 0.01)
    other = Deepen(alone, optimizer, total_steps=10)
    train(alone, optimizer, 0, 10, depth=other)
    assert other.flops == depth.flops
    assert all(map(torch.equal, task.parameters(), alone.parameters()))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_batch_that_does_not_train_finds_stacks_and_one_that_does_is_counted(guard: Any) -> None:
    model = make_gpt(4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    depth = Deepen(model, optimizer, total_steps=10)
    with guard():
        model.eval()(EXAMPLE[:1])
        model.train()
    assert depth.awake == {"blocks": 1}
    train(model, optimizer, 0, 1, depth=depth)
    counted = Deepen(other := make_gpt(4), torch.optim.SGD(other.parameters()), example=EXAMPLE)
    assert depth.flops == counted.count_flops(EXAMPLE).per_batch({"blocks": 1})
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_the_hook_keeps_nothing_alive_and_its_copies_do_nothing() -> None:
    class Owner:
        calls = 0

        def on_call(self, *_: Any) -> None:
            self.calls += 1

    owner, model = Owner(), nn.Linear(2, 2)
    FirstBatch(owner.on_call).hook([model])
    x = torch.zeros(1, 2)
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x)
    assert owner.calls == 1
    del owner
    gc.collect()
    model(x)
    unhook(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_a_wrong_name_is_refused_with_the_right_ones() -> None:
    model = make_gpt(4)
    stacks = ["decoder.blocks.0"]
    depth = Deepen(model, torch.optim.SGD(model.parameters()), stacks=stacks, total_steps=3)
    with pytest.raises(UsageError, match=r"'decoder\.blocks\.0' cannot .* stacks found: blocks"):
        model(EXAMPLE)
    assert not depth.is_finished


def test_an_error_of_the_model_itself_is_not_hidden() -> None:
    class Failing(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            raise ZeroDivisionError("mine")

    model = Failing()
    depth = Deepen(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=3)
    with pytest.raises(ZeroDivisionError, match="mine"):
        model(EXAMPLE)
    assert not depth.is_finished
