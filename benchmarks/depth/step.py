"""One optimizer step of a depth cell, on a GPU replayed as a CUDA graph.

Networks of 10 million parameters launch kernels more slowly than the GPU runs them. A graph of the
whole step (forward, backward, clipping, optimizer) has no launches left, so that seconds measure
the work itself. The graph is captured anew when blocks wake.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

_STEPS_BEFORE_CAPTURE = 3
"""Steps launched one by one before a capture: kernels are chosen and states of new blocks made."""


class TrainingStep:
    """Trains on one batch after another; the rate is set by `set_rate`."""

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, max_norm: float | None, rate: float
    ) -> None:
        """Take what is trained; `max_norm` clips the gradients, None leaves them."""
        self._network, self._optimizer, self._max_norm = network, optimizer, max_norm
        device = next(network.parameters()).device
        self._device, self._is_captured = device, device.type == "cuda"
        self._rate = torch.tensor(rate, device=device)
        if self._is_captured:
            for group in optimizer.param_groups:
                group["lr"] = self._rate
        self._graph: torch.cuda.CUDAGraph | None = None
        self._since = 0

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""
        if self._is_captured:
            self._rate.fill_(rate)
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = rate

    def renew(self) -> None:
        """Forget the captured step: the network or the optimizer's state is another one now."""
        self._graph, self._since = None, 0

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch and return its loss, which the next step may overwrite."""
        if not self._is_captured or self._since < _STEPS_BEFORE_CAPTURE:
            self._since += 1
            return self._step(inputs, targets)
        if self._graph is None:
            self._inputs, self._targets = inputs.clone(), targets.clone()
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._loss = self._step(self._inputs, self._targets)
            self._graph = graph
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        bf16 = torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._is_captured, cache_enabled=False
        )
        with bf16:
            logits = self._network(inputs).float()
            # Shares of classes have their own axis, as logits do.
            flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
            loss = F.cross_entropy(logits.flatten(0, -2), flat)
        loss.backward()
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._network.parameters(), self._max_norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()
