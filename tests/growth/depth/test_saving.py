"""What is said when the weights of sleeping blocks are saved, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.growth.depth.deepen import Deepen
from esper.growth.depth.saving import OnSave
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from tests.growth.depth.models import GPT, make_gpt, train

SAID = r"while only 2 of 4 blocks were awake; .*depth\.state_dict\(\) .*with depth\.export\(\):"


def begun(**options: Any) -> tuple[GPT, Any, Deepen]:
    """A run after three steps, with two of four blocks awake."""
    model = make_gpt(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    depth = Deepen(model, optimizer, total_steps=10, **options)
    train(model, optimizer, 0, 3, depth=depth)
    assert depth.awake == {"blocks": 2}
    return model, optimizer, depth


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.state_dict(),
        lambda model: nn.ModuleDict({"net": model}).state_dict(),
        lambda model: torch.compile(model).state_dict(),
        lambda model: AveragedModel(model) and model.blocks.state_dict(),
    ],
    ids=["model", "in a wrapper", "compiled", "a part"],
)
def test_weights_saved_alone_are_said_once_at_the_next_step(read: Callable[[GPT], Any]) -> None:
    model, optimizer, depth = begun()
    read(model)
    with pytest.warns(EsperWarning, match=SAID) as found:
        train(model, optimizer, 3, 4, depth=depth)
    assert len(found) == 1
    # Not again, and nothing is left in the model.
    read(model)
    train(model, optimizer, 4, 6, depth=depth)
    assert depth.is_finished
    assert not any(module._state_dict_pre_hooks for module in model.modules())


def test_a_save_with_the_state_of_depth_is_complete_in_any_order() -> None:
    model, optimizer, depth = begun(start=2, at={9: 4})
    for step in range(3, 6):
        model.state_dict()
        depth.state_dict()
        train(model, optimizer, step, step + 1, depth=depth)
        depth.state_dict()
        model.state_dict()
    train(model, optimizer, 6, 7, depth=depth)
    depth.saves.end()


def test_what_is_saved_inside_export_and_before_the_first_step_is_complete() -> None:
    model, optimizer, depth = begun(start=2, at={9: 4})
    with depth.export():
        model.state_dict()
    train(model, optimizer, 3, 4, depth=depth)
    model = make_gpt(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    depth = Deepen(model, optimizer, total_steps=100)
    model.state_dict()
    train(model, optimizer, 0, 2, depth=depth)


def test_weights_saved_alone_at_the_end_are_said_when_depth_is_freed() -> None:
    model, _, depth = begun()
    model.state_dict()
    with pytest.warns(EsperWarning, match=SAID):
        del depth
    model, _, depth = begun()
    del depth
    # Without a Deepen nothing can follow.
    with pytest.warns(EsperWarning, match=SAID):
        model.state_dict()


PROGRAM = """
import warnings
from tests.growth.depth.test_saving import begun
model, _, depth = begun()
model.state_dict()
print("saved", flush=True)
"""


@pytest.mark.parametrize("options", [[], ["-W", "error"]])
def test_weights_saved_alone_are_said_at_the_end_of_the_program(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "saved\n"
    assert done.stderr.count("EsperWarning: model.state_dict() was read while only 2 of 4") == 1
    assert "Traceback" not in done.stderr


def test_in_a_notebook_they_are_said_after_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Callable[[Any], None]] = []
    events = SimpleNamespace(
        register=lambda _, callback: callbacks.append(callback),
        unregister=lambda _, callback: callbacks.remove(callback),
    )
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(events=events))
    model, _, depth = begun()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    model.state_dict()
    (after_cell,) = callbacks
    with pytest.warns(EsperWarning, match=SAID):
        after_cell(None)
    assert callbacks == []
    model.state_dict()
    depth.state_dict()
    assert callbacks == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_warns(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, depth = begun(start=2, at={9: 4})
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        patched.setattr(torch.distributed, "get_rank", lambda: rank)
        model.state_dict()
    with nullcontext() if rank else pytest.warns(EsperWarning, match=SAID):
        depth.step()


def test_copies_of_a_model_are_watched_no_longer() -> None:
    model, optimizer, depth = begun()
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (twin, pickled):
        (hook,) = one.blocks[3]._state_dict_pre_hooks.values()
        assert isinstance(hook, OnSave)
        one.state_dict()
        # A new run with it removes the hook.
        Deepen(one, torch.optim.SGD(one.parameters(), 0.1), total_steps=10)
        assert not one.blocks[3]._state_dict_pre_hooks
    train(model, optimizer, 3, 4, depth=depth)


# -- what is refused ------------------------------------------------------------------------------


def test_a_deepen_cannot_be_pickled() -> None:
    depth = begun()[2]
    for write in (pickle.dumps, copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(UsageError, match=r"bound to its model .*; save depth\.state_dict\(\)"):
            write(depth)


@pytest.mark.parametrize("is_begun", [True, False])
def test_other_states_are_refused(is_begun: bool) -> None:
    model, optimizer, depth = begun()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "depth": depth.state_dict(),
    }
    if not is_begun:
        depth = Deepen(other := make_gpt(4), torch.optim.SGD(other.parameters()), total_steps=10)
    with pytest.raises(CheckpointError, match=r"keys 'model', 'opt.*; give its part 'depth'"):
        depth.load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"keys 'embed\.weight', .*; save depth\.state_d"):
        depth.load_state_dict(saved["model"])
    with pytest.raises(CheckpointError, match="got a NoneType"):
        depth.load_state_dict(None)  # type: ignore[arg-type]
    depth.load_state_dict(saved["depth"])
