"""CapturedPolicyStep: one policy step for a fixed number of rows, replayed from a CUDA graph.

A step is some hundred small kernels; launching them one by one costs more than running them. The
graph launches all of them at once. It reads the network's weights where they are, so an optimizer
that writes in place needs no new capture; moving the network to another device, or replacing its
parameters, does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.process import without_collections
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.head_table import NUM_HEADS, MaskSource
from esper.tamiyo.networks.memory import Hidden, check_hidden
from esper.tamiyo.networks.records import PolicyStep

_WARM_UP = 3


class CapturedPolicyStep:
    """Calls like `get_action`, at the price of one launch.

    Draws come from `uniforms`, or from PyTorch's own numbers on the device, which advance with
    every replay. The result is a view of the graph's own memory and is overwritten by the next
    call: `clone()` what has to stay. Nothing is checked, as a graph cannot look at its values.

    Args:
        policy: the network; it must be on a CUDA device.
        rows: number of rows of every call.
        deterministic: take the likeliest choices instead of drawing.
        explore: whether the distribution has floors.

    Raises:
        UsageError: The network is not on a CUDA device; use `get_action` there.
    """

    def __init__(
        self,
        policy: FactoredRecurrentActorCriticV2,
        rows: int,
        *,
        deterministic: bool = False,
        explore: bool = True,
    ) -> None:
        """Run the step a few times, then capture it."""
        device = policy.floors.device
        if device.type != "cuda":
            raise UsageError(
                f"a policy step can be captured on a CUDA device only, and the network is on "
                f"{str(device)!r}; move it there or call get_action"
            )
        if rows < 1:
            raise UsageError(f"a captured step needs at least 1 row, got {rows}")
        self._policy, self._rows = policy, rows
        self._deterministic, self._explore = deterministic, explore
        config, table = policy.config, policy.table
        self._state = torch.zeros(rows, config.observation_dim, device=device)
        self._blueprints = torch.full((rows, config.num_slots), -1, device=device)
        self._masks = table.everything.expand(rows, -1, -1).clone()
        self._uniforms = torch.rand(rows, NUM_HEADS, device=device)
        self._hidden = policy.initial_hidden(rows)
        with torch.cuda.device(device), torch.no_grad():
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._run()
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with without_collections(), torch.cuda.graph(self._graph):
                self._step = self._run()

    @torch.no_grad()
    def __call__(
        self,
        state: Tensor,
        mask: MaskSource | None = None,
        blueprint_indices: Tensor | None = None,
        hidden: Hidden | None = None,
        *,
        uniforms: Tensor | None = None,
    ) -> PolicyStep:
        """Decide one step; the arguments are those of `get_action`.

        The memory of the last step may be passed on as it is.
        """
        if tuple(state.shape) != tuple(self._state.shape):
            raise UsageError(
                f"this step was captured for states {list(self._state.shape)}, "
                f"got {list(state.shape)}"
            )
        self._state.copy_(state)
        if blueprint_indices is None:
            self._blueprints.fill_(-1)
        else:
            self._blueprints.copy_(blueprint_indices)
        self._masks.copy_(self._policy.table.row_masks(mask, (self._rows,)))
        if hidden is None:
            self._hidden[0].zero_()
            self._hidden[1].zero_()
        else:
            check_hidden(hidden, self._policy.lstm, self._rows)
            self._hidden[0].copy_(hidden[0])
            self._hidden[1].copy_(hidden[1])
        if not self._deterministic:
            if uniforms is None:
                self._uniforms.uniform_()
            else:
                self._uniforms.copy_(uniforms)
        self._graph.replay()
        return self._step

    def refresh(self) -> None:
        """Do nothing: the graph reads the weights where they are."""

    def _run(self) -> PolicyStep:
        step, _ = self._policy.decide(
            self._state,
            self._blueprints,
            self._masks,
            None if self._deterministic else self._uniforms,
            self._hidden,
            explore=self._explore,
        )
        return step
