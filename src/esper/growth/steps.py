"""A warning for loops that never call the `step()` of `Deepen` or `Adapt`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from esper.leyline.errors import warn


class ForgottenSteps:
    """Warns once if an optimizer has taken some steps before `stop()` is called.

    Args:
        is_watched: whether the steps of an optimizer count.
        after: number of steps that may pass.
        problem: the warning.
    """

    def __init__(self, is_watched: Callable[[Optimizer], bool], after: int, problem: str) -> None:
        """Watch all optimizers, of which the right one may not be made yet."""
        self._is_watched = is_watched
        self._left = after
        self._problem = problem
        count = weakref.WeakMethod(self._count)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if (method := count()) is not None:
                method(optimizer)

        self._hook = register_optimizer_step_post_hook(after_step)

    def stop(self) -> None:
        """Watch no longer."""
        self._hook.remove()

    def _count(self, optimizer: Optimizer) -> None:
        # The hook stays after the warning, because PyTorch is iterating over its hooks now.
        if self._left >= 0 and self._is_watched(optimizer):
            self._left -= 1
            # One step more, because the forgotten call follows the optimizer's.
            if self._left < 0:
                warn(self._problem)
