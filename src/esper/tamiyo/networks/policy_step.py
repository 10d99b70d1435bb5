"""Fast policy steps for rollouts: packed weights on a CPU, a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.errors import UsageError
from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.decision import BLUEPRINT, NUM_HEADS, MaskSource, PolicyStep
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.layers import Hidden, check_hidden, first_layer, has_onednn
from esper.utils.process import capture_graph

_WARM_UP = 3


class CapturedPolicyStep:
    """`get_action` as a CUDA graph, launched at once.

    Draws come from `uniforms`, or from PyTorch's generator on the device. The result is a view of
    the graph's memory, and the next call overwrites it: `clone()` what you keep. Nothing is
    checked, because a graph cannot read its values.

    Args:
        policy: the network; it must be on a CUDA device.
        rows: number of rows of every call.

    Raises:
        UsageError: The network is not on a CUDA device; use `get_action` there.
    """

    def __init__(self, policy: ActorCritic[Any], rows: int) -> None:
        device = policy.floors.device
        if device.type != "cuda":
            raise UsageError(
                f"a policy step can be captured on a CUDA device only, and the network is on "
                f"{str(device)!r}; move it there or call get_action"
            )
        if rows < 1:
            raise UsageError(f"a captured step needs at least 1 row, got {rows}")
        self._policy, self._rows = policy, rows
        config, table = policy.config, policy.table
        self._state = torch.zeros(rows, config.observation_dim, device=device)
        self._blueprints = torch.full((rows, config.num_slots), -1, device=device)
        self._masks = table.everything.expand(rows, -1, -1).clone()
        self._uniforms = torch.rand(rows, NUM_HEADS, device=device)
        self._hidden = policy.initial_hidden(rows)
        self._capture()

    def _capture(self) -> None:
        """Warm up, then capture a step with the current places of the weights."""
        device = self._state.device
        self._captured = _places(self._policy)
        with torch.cuda.device(device), torch.no_grad():
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._run()
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with capture_graph(self._graph):
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

        `hidden` may be that of the last step, without a copy.
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
        if uniforms is None:
            self._uniforms.uniform_()
        else:
            self._uniforms.copy_(uniforms)
        self._graph.replay()
        return self._step

    def refresh(self) -> None:
        """Capture the step again if weights have moved, because the graph reads the old places.

        cuDNN packs the weights of an LSTM into new memory whenever `to(device)` is called, even for
        the same device.
        """
        if _places(self._policy) != self._captured:
            self._capture()

    def _run(self) -> PolicyStep:
        inputs = self._state, self._blueprints, self._masks, self._uniforms, self._hidden
        return self._policy.decide(*inputs, explore=True)[0]


Layer = Callable[[Tensor], Tensor]

_GATES = (0, 1, 3, 2)
"""PyTorch's gates i, f, g, o in the order i, f, o, g, so that the three sigmoids are one call."""


class PlainPolicyStep:
    """`get_action` itself, for networks without a faster way on a CPU."""

    def __init__(self, policy: ActorCritic[Any]) -> None:
        self._policy = policy

    def __call__(self, *inputs: Any, **draws: Any) -> PolicyStep:
        """Decide one step; the arguments are those of `get_action`."""
        return self._policy.get_action(*inputs, **draws)

    def refresh(self) -> None:
        """Do nothing: there is no copy of the weights."""


class PackedPolicyStep:
    """`get_action` of the documents' network with packed weights: the same decisions, faster.

    Args:
        policy: the network; it must be on the CPU.
        rows: number of rows to pack for; other numbers work too, but more slowly.

    Raises:
        UsageError: The network is not on the CPU; use `CapturedPolicyStep` there.
    """

    def __init__(self, policy: FactoredRecurrentActorCriticV2, rows: int) -> None:
        if policy.floors.device.type != "cpu":
            raise UsageError(
                f"weights can be packed for the CPU only, and the network is on "
                f"{str(policy.floors.device)!r}; use CapturedPolicyStep there"
            )
        self._policy, self._rows = policy, rows
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the network."""
        policy = self._policy
        self._weights = list(policy.parameters())
        self._seen = self._versions()
        self._features = self._pack([_linear(policy.feature_net, 0)])
        self._cells = [self._pack_cell(*weights) for weights in policy.lstm.all_weights]
        # The first layers of plain heads, blueprint head and critic, side by side.
        plain = [head for index, head in enumerate(policy.heads) if index != BLUEPRINT]
        value = self._critic_layer()
        firsts = [_linear(head, 0) for head in (*plain, policy.blueprint_head)]
        self._first = self._pack([*firsts, value])
        self._parts = (sum(each.out_features for each in firsts[:-1]), firsts[-1].out_features)
        # The last layers of the plain heads as one block-diagonal layer.
        lasts = [_linear(head, -1) for head in plain]
        blocks = torch.block_diag(*(layer.weight for layer in lasts))
        self._last = _packed(blocks, torch.cat([layer.bias for layer in lasts]), self._rows)
        self._necks = [
            self._pack([layer], relu=True)
            for layer in list(policy.blueprint_head)[1:-1]
            if isinstance(layer, nn.Linear)
        ]
        self._blueprint = self._pack([_linear(policy.blueprint_head, -1)])
        self._before = sum(layer.out_features for layer in lasts[:BLUEPRINT])

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
            UsageError: The network has changed since its weights were copied.
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
        if uniforms is None:
            uniforms = torch.rand(len(state), NUM_HEADS, generator=generator)
        legal = policy.table.row_masks(mask, (len(state),))
        logits, judged, hidden = self._respond(state, blueprint_indices, hidden)
        step = policy.choose(logits, judged, hidden, legal, uniforms, explore=True)
        policy.check_step(step, logits)
        return step

    def _respond(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Return the same as `FactoredRecurrentActorCriticV2.respond`."""
        # The row of an empty slot, -1, is the last one.
        seeds = self._policy.blueprint_embedding.embedding.weight[blueprint_indices]
        features = self._features(torch.cat([state, seeds.flatten(1)], dim=1))
        output = _normalize(features, self._policy.feature_net[1]).relu_()
        states, cells = [], []
        for layer, gates in enumerate(self._cells):
            output, cell = _run_cell(gates, output, hidden[0][layer], hidden[1][layer])
            states.append(output.unsqueeze(0))
            cells.append(cell.unsqueeze(0))
        first = self._first(_normalize(output, self._policy.lstm_ln))
        plain, wide = self._parts
        heads = first[:, : plain + wide].relu_()
        logits = self._last(heads[:, :plain])
        blueprint = heads[:, plain:]
        for neck in self._necks:
            blueprint = neck(blueprint)
        blueprint = self._blueprint(blueprint)
        at = self._before
        logits = torch.cat([logits[:, :at], blueprint, logits[:, at:]], dim=1)
        judged = first[:, plain + wide :]
        if len(cells) == 1:
            return logits, judged, (states[0], cells[0])
        return logits, judged, (torch.cat(states), torch.cat(cells))

    def _critic_layer(self) -> nn.Linear:
        """Return the critic's first layer without the op, which `choose` adds."""
        layer, width = first_layer(self._policy.value_head), self._policy.config.lstm_hidden_dim
        memory = nn.Linear(width, layer.out_features)
        memory.weight.copy_(layer.weight[:, :width])
        memory.bias.copy_(layer.bias)
        return memory

    def _pack_cell(self, w_input: Tensor, w_hidden: Tensor, *biases: Tensor) -> Layer:
        """Return one layer for input and state together, with its gates in the order `_GATES`."""
        weight = torch.cat([w_input, w_hidden], dim=1).chunk(4)
        bias = (biases[0] + biases[1]).chunk(4)
        return _packed(
            torch.cat([weight[gate] for gate in _GATES]),
            torch.cat([bias[gate] for gate in _GATES]),
            self._rows,
        )

    def _pack(self, layers: Sequence[nn.Linear], *, relu: bool = False) -> Layer:
        """Return layers that read the same input as one."""
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        return _packed(weight, bias, self._rows, relu=relu)

    def _versions(self) -> list[tuple[int, int]]:
        """Return numbers that change when a parameter is written to or moved."""
        return [(weight.data_ptr(), weight._version) for weight in self._weights]


def _places(policy: nn.Module) -> list[int]:
    """Return the addresses of a network's weights and buffers."""
    return [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]


def _normalize(x: Tensor, norm: nn.Module) -> Tensor:
    assert isinstance(norm, nn.LayerNorm)
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _run_cell(gates: Layer, features: Tensor, state: Tensor, cell: Tensor) -> Hidden:
    """Return the state and the cell after one LSTM step with gates in the order i, f, o, g."""
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
    """Return a linear layer with weights in oneDNN's layout, if PyTorch has oneDNN."""
    weight, bias = weight.detach().clone(), bias.detach().clone()
    if not has_onednn():
        return lambda x: F.relu(F.linear(x, weight, bias)) if relu else F.linear(x, weight, bias)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    multiply, activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"

    def run(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, blocks, bias, activation, [], "")
        return result

    return run


def rollout_step(
    policy: ActorCritic[Any], rows: int
) -> CapturedPolicyStep | PackedPolicyStep | PlainPolicyStep:
    """Return a replacement for `policy.get_action`; `refresh()` it after every update.

    It draws from the distribution with floors, as a rollout needs it.

    Args:
        policy: the network, on a CPU or a CUDA device.
        rows: number of rows of every call.
    """
    if policy.floors.is_cuda:
        return CapturedPolicyStep(policy, rows)
    if isinstance(policy, FactoredRecurrentActorCriticV2):
        return PackedPolicyStep(policy, rows)
    return PlainPolicyStep(policy)
