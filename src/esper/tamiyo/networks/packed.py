"""PackedPolicyStep: one policy step on a CPU, from weights laid out the way a step reads them.

A step is bound by reading fourteen megabytes of weights. Here they are copied once into the blocks
that oneDNN multiplies best, the first layers of all heads side by side and the gates of the memory
in an order that needs fewer passes. It is for acting between two updates: the copy does not follow
the network, so `refresh()` it after every update. A network that has changed since is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.errors import UsageError
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.head_table import BLUEPRINT, NUM_HEADS, MaskSource
from esper.tamiyo.networks.memory import Hidden, check_hidden
from esper.tamiyo.networks.records import PolicyStep

Layer = Callable[[Tensor], Tensor]


class PackedPolicyStep:
    """Calls like `get_action`, to the same decisions, in less time.

    Args:
        policy: the network; it must be on the CPU.
        rows: number of rows the layout is meant for; any other number works, more slowly.
        deterministic: take the likeliest choices instead of drawing.
        explore: whether the distribution has floors.

    Raises:
        UsageError: The network is not on the CPU; use `CapturedPolicyStep` there.
    """

    def __init__(
        self,
        policy: FactoredRecurrentActorCriticV2,
        rows: int,
        *,
        deterministic: bool = False,
        explore: bool = True,
    ) -> None:
        """Copy the weights."""
        if policy.floors.device.type != "cpu":
            raise UsageError(
                f"weights can be packed for the CPU only, and the network is on "
                f"{str(policy.floors.device)!r}; use CapturedPolicyStep there"
            )
        self._policy, self._rows = policy, rows
        self._deterministic, self._explore = deterministic, explore
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weights the network has now."""
        policy = self._policy
        self._cells = [self._pack_cell(*weights) for weights in policy.lstm.all_weights]
        plain = [head for index, head in enumerate(policy.heads) if index != BLUEPRINT]
        firsts = [_linear(head, 0) for head in (*plain, policy.blueprint_head)]
        self._first = self._pack(firsts, relu=True)
        self._split = sum(layer.out_features for layer in firsts[:-1])
        # The last layers of the plain heads as one: each block sees its own head's part.
        lasts = [_linear(head, -1) for head in plain]
        blocks = torch.block_diag(*(layer.weight for layer in lasts))
        self._last = _packed(blocks, torch.cat([layer.bias for layer in lasts]), self._rows)
        self._neck = self._pack([_linear(policy.blueprint_head, 2)], relu=True)
        self._blueprint = self._pack([_linear(policy.blueprint_head, -1)])
        self._before = sum(layer.out_features for layer in lasts[:BLUEPRINT])
        self._seen = self._versions()

    @torch.no_grad()
    def __call__(
        self,
        state: Tensor,
        mask: MaskSource | None = None,
        blueprint_indices: Tensor | None = None,
        hidden: Hidden | None = None,
        *,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyStep:
        """Decide one step; the arguments are those of `get_action`.

        Raises:
            UsageError: The network has changed since its weights were taken over.
        """
        if self._versions() != self._seen:
            raise UsageError("the network has changed since its weights were packed; refresh() it")
        policy = self._policy
        if blueprint_indices is None:
            blueprint_indices = torch.full((len(state), policy.config.num_slots), -1)
        policy.check_inputs(state, blueprint_indices)
        if hidden is None:
            hidden = policy.initial_hidden(len(state))
        check_hidden(hidden, policy.lstm, len(state))
        if self._deterministic:
            uniforms = None
        elif uniforms is None:
            uniforms = torch.rand(len(state), NUM_HEADS, generator=generator)
        legal = policy.table.row_masks(mask, (len(state),))
        logits, op_values, hidden = self._respond(state, blueprint_indices, hidden)
        step = policy.choose(logits, op_values, hidden, legal, uniforms, explore=self._explore)
        policy.check_step(step, logits)
        return step

    def _respond(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Return what `FactoredRecurrentActorCriticV2.respond` does."""
        policy = self._policy
        output = policy.encode(state, blueprint_indices)
        states, cells = [], []
        for layer, gates in enumerate(self._cells):
            output, cell = _run_cell(gates, output, hidden[0][layer], hidden[1][layer])
            states.append(output)
            cells.append(cell)
        memory = policy.lstm_ln(output)
        first = self._first(memory)
        plain = self._last(first[:, : self._split])
        blueprint = self._blueprint(self._neck(first[:, self._split :]))
        at = self._before
        logits = torch.cat([plain[:, :at], blueprint, plain[:, at:]], dim=1)
        return logits, policy.op_values(memory), (torch.stack(states), torch.stack(cells))

    def _pack_cell(self, w_input: Tensor, w_hidden: Tensor, *biases: Tensor) -> Layer:
        """Return one product for input and state, its gates in the order i, f, o, g.

        PyTorch's order is i, f, g, o. With g last, the three sigmoids are one pass.
        """
        weight = torch.cat([w_input, w_hidden], dim=1)
        bias = biases[0] + biases[1]
        order = (0, 1, 3, 2)
        weight = torch.cat([weight.chunk(4)[gate] for gate in order])
        bias = torch.cat([bias.chunk(4)[gate] for gate in order])
        return _packed(weight, bias, self._rows)

    def _pack(self, layers: Sequence[nn.Linear], *, relu: bool = False) -> Layer:
        """Return layers that read the same input as one."""
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        return _packed(weight, bias, self._rows, relu=relu)

    def _versions(self) -> list[tuple[int, int]]:
        """Return what changes when a parameter is written to or replaced."""
        return [(weight.data_ptr(), weight._version) for weight in self._policy.parameters()]


def _run_cell(gates: Layer, features: Tensor, state: Tensor, cell: Tensor) -> Hidden:
    """Return the state and the cell after one step of a memory whose gates are i, f, o, g."""
    width = state.shape[-1]
    values = gates(torch.cat([features, state], dim=1))
    admit, forget, emit = values[:, : 3 * width].sigmoid_().split(width, dim=1)
    cell = torch.addcmul(forget * cell, admit, values[:, 3 * width :].tanh_())
    return emit * cell.tanh(), cell


def _linear(layers: nn.Sequential, index: int) -> nn.Linear:
    layer = layers[index]
    assert isinstance(layer, nn.Linear), "heads are linear layers with ReLUs between them"
    return layer


def _packed(weight: Tensor, bias: Tensor, rows: int, *, relu: bool = False) -> Layer:
    """Return a linear layer whose weights are in oneDNN's blocks where PyTorch has them."""
    weight, bias = weight.detach().clone(), bias.detach().clone()
    if not _has_onednn():
        return lambda x: F.relu(F.linear(x, weight, bias)) if relu else F.linear(x, weight, bias)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    multiply, activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"

    def run(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, blocks, bias, activation, [], "")
        return result

    return run


def _has_onednn() -> bool:
    """Return whether this build of PyTorch has the products that its compiler uses on a CPU."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
