from __future__ import annotations

import torch

from esper.leyline.actions import LifecycleOp
from esper.tamiyo.controllers.baselines import WaitController
from esper.testing.controllers import random_signals


def test_waits_whatever_it_sees() -> None:
    controller = WaitController()
    controller.reset(5, "cpu")
    stream = torch.Generator().manual_seed(1)
    for _ in range(20):
        actions = controller.act(*random_signals(5, 3, stream))
        assert actions["op"].tolist() == [int(LifecycleOp.WAIT)] * 5
    assert controller.state_dict() == {}
