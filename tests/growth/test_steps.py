"""The warning for loops that forget to count their steps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from esper.growth.steps import ForgottenSteps
from esper.leyline.errors import EsperWarning


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


def test_it_warns_once_and_only_of_the_watched_optimizer() -> None:
    watched, other = sgd(), sgd()
    forgotten = ForgottenSteps(lambda one: one is watched, 2, "call it")
    for _ in range(9):
        other.step()
    watched.step()
    watched.step()
    with pytest.warns(EsperWarning, match="call it"):
        watched.step()
    watched.step()
    forgotten.stop()


def test_other_hooks_of_the_optimizer_still_run() -> None:
    watched, calls = sgd(), []
    forgotten = ForgottenSteps(lambda one: one is watched, 0, "call it")
    watched.register_step_post_hook(lambda *_: calls.append("own"))
    hook = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    with pytest.warns(EsperWarning, match="call it"):
        watched.step()
    hook.remove()
    forgotten.stop()
    assert calls == ["own", "all"]


def test_a_stopped_or_dead_watch_is_silent() -> None:
    watched, before = sgd(), len(_global_optimizer_post_hooks)
    ForgottenSteps(lambda one: one is watched, 0, "call it").stop()
    assert len(_global_optimizer_post_hooks) == before
    forgotten = ForgottenSteps(lambda one: one is watched, 0, "call it")
    known = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert known() is None
    watched.step()
