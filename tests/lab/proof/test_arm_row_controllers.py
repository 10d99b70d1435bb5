from __future__ import annotations

import pytest
import torch

from esper.lab.proof.arm import RowControllers
from esper.tamiyo.controllers import RandomController, WaitController
from esper.testing.controllers import check_controller, random_signals


def test_every_controller_sees_its_own_rows_as_if_there_were_no_others() -> None:
    signals, masks = random_signals(5, 3, torch.Generator().manual_seed(1))
    both = RowControllers([(RandomController(3), [4, 0, 2]), (WaitController(), [1, 3])])
    both.reset(5, "cpu")
    actions = both.act(signals, masks)
    alone = RowControllers([(RandomController(3), [0, 1, 2])])
    alone.reset(3, "cpu")
    chosen = torch.tensor([4, 0, 2])
    own = {name: getattr(signals, name)[chosen] for name in signals.__slots__}
    legal = {name: getattr(masks, name)[chosen] for name in masks.__slots__}
    expected = alone.act(type(signals)(**own), type(masks)(**legal))
    for head, values in actions.items():
        assert values[chosen].tolist() == expected[head].tolist()
    assert actions["op"][[1, 3]].tolist() == [0, 0]


def test_it_keeps_the_protocol() -> None:
    check_controller(
        lambda context: RowControllers([(RandomController(context.seed), [0, 1, 2])]), rows=(3,)
    )


def test_every_row_needs_a_controller() -> None:
    with pytest.raises(AssertionError, match="every row"):
        RowControllers([(WaitController(), [0, 2])]).reset(3, "cpu")
