"""A slot: holds a seed behind a submodule and mixes its output with the host's activation."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.kasmina.calls import is_shareable, replace_first
from esper.kasmina.slots.probe import first_tensor
from esper.leyline.actions import apply_function
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.slots import AXES, AxesName, Symmetry, Topology, channel_axis
from esper.leyline.stages import AlphaAlgorithm

# ---- Mixing a seed into its host, and the gate network of the GATE style


class GateNetwork(nn.Module):
    """Predicts how much of the seed to mix in, in [0, 1].

    Image and vector activations are pooled to one number per sample. A sequence gets one number
    per position: pooling over time would show early tokens their own future.
    """

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the gate for activations with this many channels."""
        super().__init__()
        hidden = max(8, channels // 4)
        self.topology: Topology = topology
        self.hidden = nn.Linear(channels, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gate in a shape that broadcasts against `x`."""
        pooled = x.mean((-2, -1)) if self.topology == "cnn" else x
        gate = torch.sigmoid(self.out(torch.relu(self.hidden(pooled))))
        return gate[..., None, None] if self.topology == "cnn" else gate


def blend(
    h: Tensor, s: Tensor, alpha: Tensor, algorithm: int, gate: nn.Module | None = None
) -> Tensor:
    """Return the mixture of host and seed; `alpha` broadcasts against `h` and may not be 0."""
    s = s.to(h.dtype)
    alpha = alpha.to(h.dtype)
    if algorithm == int(AlphaAlgorithm.ADD):
        return h + alpha * (s - h)
    if algorithm == int(AlphaAlgorithm.MULTIPLY):
        return h * (1 + alpha * torch.tanh(s - h))
    assert gate is not None, "the GATE algorithm needs a gate network"
    opening: Tensor = gate(h).to(h.dtype)
    return h + alpha * opening * (s - h)


def blend_rows(
    h: Tensor, s: Tensor, alpha: Tensor, multiplies: Tensor | None, opening: Tensor | None
) -> Tensor:
    """Blend many networks at once, each by its own algorithm.

    Args:
        h: activations of the hosts, [n, B, ...].
        s: outputs of the seeds, like `h`.
        alpha: amplitudes, broadcasting against `h`.
        multiplies: where the algorithm is MULTIPLY; None where it nowhere is.
        opening: what gate networks let in, 1 where there is none; None where there are none.
    """
    difference = s.to(h.dtype) - h
    change = difference if opening is None else opening.to(h.dtype) * difference
    if multiplies is not None:
        change = torch.where(multiplies, h * torch.tanh(difference), change)
    return h + alpha.to(h.dtype) * change


def blend_per_sample(
    h: Tensor, s: Tensor, alpha: Tensor, algorithm: int, gate: nn.Module | None = None
) -> Tensor:
    """Blend with one alpha per sample; samples at 0 are the host's, whatever the seed says."""
    alpha = alpha.reshape(-1, *([1] * (h.dim() - 1)))
    return torch.where(alpha > 0, blend(h, s, alpha, algorithm, gate), h)


class _StraightThrough(torch.autograd.Function):
    """Return the host's value and send the gradient to both: `h + (b - stopgrad(b))`, exactly."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, b: Tensor) -> Tensor:
        # A copy: what follows may work in place, which a view of `h` would forbid.
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def straight_through(h: Tensor, b: Tensor) -> Tensor:
    """Return `h` bit for bit, while `b` receives the gradient of the output.

    A non-finite `b` cannot reach the host: its value is never used.
    """
    return apply_function(_StraightThrough, h, b)


class SlotMode(IntEnum):
    """How a slot acts in a forward pass."""

    PASS = 0
    ISOLATE = 1
    BLEND = 2
    REPLACE = 3
    """The output is the seed's alone, to the bit."""


MIXING = (SlotMode.BLEND, SlotMode.REPLACE)
"""The modes in which the seed reaches the output."""


class CallArguments(NamedTuple):
    """Arguments of a call of the host's submodule; a copy of it is called with the same."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def detached(self) -> CallArguments:
        """Return the same arguments, cut off from the graph."""
        return CallArguments(*tree_map_only(Tensor, Tensor.detach, (self.args, self.kwargs)))


class Slot(nn.Module):
    """Holds a seed and mixes its output with the host's; without a seed it passes its input on.

    The slot knows nothing of stages: its garden sets `mode`, `algorithm` and `alpha`. Amplitude is
    a tensor, so that a compiled network is not compiled again whenever it moves.
    """

    alpha: Tensor
    stage = ""
    """Stage of the seed in lower case, for printing; empty without one."""
    blueprint = ""
    """Name of the seed's blueprint."""

    def __init__(
        self,
        name: str,
        axes: AxesName,
        shape: tuple[int, ...],
        symmetry: Symmetry = "bidirectional",
    ) -> None:
        """Create an empty slot; `shape` is an example of what a seed sees there, batch first."""
        super().__init__()
        self.name = name
        self.axes: AxesName = axes
        self.topology: Topology = AXES[axes].topology
        self.shape = shape
        self.symmetry: Symmetry = symmetry
        self.channels = shape[channel_axis(self.topology)]
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.copies = 0
        """How many copies of the submodule in front of the slot the seed is; 0 for other seeds."""
        self.sources: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Parameters of a new copy, each with its source, until optimizers copied the state."""
        self.mode = int(SlotMode.PASS)
        self.algorithm = 0
        self.is_straight_through = True
        self.is_shadowing = False
        self.was_shadowed = False
        self.drawn: Tensor | None = None
        """Fingerprint of the seed as it was drawn; None once it has changed, or is not known."""
        self.is_known_untrained = False
        """Whether the user was warned that nothing trains the seed."""
        self.host_version: int | None = None
        """Version of the host's parameters when the seed was last seen to be as drawn."""
        self.frozen: tuple[str, ...] | None = None
        self.sample_alphas: Tensor | None = None
        self.branch: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None
        self.register_buffer("alpha", torch.zeros((), dtype=torch.float64), persistent=False)

    @property
    def copied_blocks(self) -> list[nn.Module]:
        """The copies that the seed consists of, in the order in which they run."""
        if self.seed is None or not self.copies:
            return []
        return [self.seed] if self.copies == 1 else list(self.seed.children())

    def attend(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook of the host's submodule."""
        if self.mode == SlotMode.PASS:
            return None
        given = CallArguments(args, kwargs) if self.copies else None
        if isinstance(output, Tensor):
            return self(output, given)
        rest = (self(output[0], given), *output[1:])
        # A named tuple takes its fields one by one.
        return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)

    def forward(self, h: Tensor, given: CallArguments | None = None) -> Tensor:
        """Return the host's activation with the seed mixed in, depending on the mode.

        Args:
            h: the activation.
            given: arguments of the submodule that made it, where the seed is a copy of it.
        """
        if self.mode == SlotMode.PASS or self.seed is None:
            return h
        axes = AXES[self.axes]
        if axes.is_usual:
            return self._grown(h, given)
        if h.dim() != len(axes.order):
            self._refuse(h)
        out = self._grown(h.permute(axes.order), given).permute(axes.inverse)
        # The next module may take a view of it, as it could of the host's own.
        return out.contiguous() if h.is_contiguous() else out

    def _grown(self, h: Tensor, given: CallArguments | None) -> Tensor:
        """Do the work of `forward`, for an activation in the seed's order of axes."""
        self._check(h)
        if self.branch is not None:
            return self.branch(h, lambda part: self._mixed(part, given))
        if self.sample_alphas is not None:
            self._check_samples(h, len(self.sample_alphas))
            out, alphas = self._run(h, given), self.sample_alphas
            if self.mode == SlotMode.REPLACE:
                return torch.where(alphas.reshape(-1, *[1] * (h.dim() - 1)) > 0, out, h)
            return blend_per_sample(h, out, alphas, self.algorithm, self.gate)
        if self.mode in MIXING:
            return self._mixed(h, given)
        one = torch.ones_like(self.alpha)
        if self.is_shadowing:
            return blend(h, self._run(h, given), one, self.algorithm, self.gate)
        if self.is_straight_through and self.training and torch.is_grad_enabled():
            # The seed learns from the fully blended output and a detached input, while the host
            # keeps its value and its gradient.
            x, others = h.detach(), None if given is None else given.detached()
            out = blend(x, self._run(x, others), one, self.algorithm, self.gate)
            return straight_through(h, out)
        return h

    def _mixed(self, h: Tensor, given: CallArguments | None) -> Tensor:
        out = self._run(h, given)
        if self.mode == SlotMode.REPLACE:
            return out
        return blend(h, out, self.alpha, self.algorithm, self.gate)

    def _run(self, h: Tensor, given: CallArguments | None) -> Tensor:
        """Return the seed's output; copies of a block get the host's order of axes."""
        assert self.seed is not None
        out: Tensor
        if given is None:
            out = self.seed(h)
            return out
        axes = AXES[self.axes]
        out = h if axes.is_usual else h.permute(axes.inverse)
        args, kwargs = replace_first(given.args, given.kwargs, out)
        strange = [one for one in (*args, *kwargs.values()) if not is_shareable(one)]
        if strange:
            raise SlotError(
                f"the submodule in front of slot {self.name!r} was given a "
                f"{type(strange[0]).__name__}, which its copy would change as well; where that is "
                "a cache, switch it off (use_cache=False)"
            )
        for block in self.copied_blocks:
            args, kwargs = replace_first(args, kwargs, out)
            out = first_tensor(block(*args, **kwargs))
        return out if axes.is_usual else out.permute(axes.order)

    def _check(self, h: Tensor) -> None:
        """Refuse an activation of another rank or width than the seed was built for."""
        if h.dim() != len(self.shape) or h.shape[channel_axis(self.topology)] != self.channels:
            self._refuse(h)

    def _refuse(self, h: Tensor) -> NoReturn:
        raise SlotError(
            f"slot {self.name!r} was made for activations like {list(self.shape)} "
            f"({self.channels} channels), got {list(h.shape)}; "
            "a slot's submodule must keep its rank and width"
        )

    def _check_samples(self, h: Tensor, announced: int) -> None:
        """Refuse amplitudes per sample where the model has changed the batch size on the way."""
        if announced not in (1, len(h)):
            raise SlotError(
                f"slot {self.name!r} got {len(h)} samples where {announced} were announced; "
                "a model that regroups its batch is measured by a function evaluate(model)"
            )

    def describe_seed(self) -> str:
        """Return one line about the seed, for printing; empty without one."""
        if self.seed is None:
            return ""
        size = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"seed={self.blueprint} ({self.stage}, alpha {float(self.alpha):.2f}, "
            f"{size:,} parameters)"
        )

    def extra_repr(self) -> str:
        """Return the line that a printed module shows."""
        return f"{self.name!r}, {self.axes}, channels={self.channels}"


class Shadow(nn.Module):
    """Runs a garden with one seed fully blended and everything else frozen.

    It uses detached parameters and copies of the buffers, and restores the random state, so the
    pass leaves no trace in the host.
    """

    def __init__(self, garden: nn.Module, slot: Slot) -> None:
        """Look at `garden` with the seed of `slot` at full amplitude."""
        super().__init__()
        # Plain attributes: a shadow owns neither of them as a submodule.
        self.__dict__["garden"] = garden
        self.__dict__["slot"] = slot
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the garden so that only this seed's parameters receive a gradient."""
        garden: nn.Module = self.__dict__["garden"]
        slot: Slot = self.__dict__["slot"]
        self.was_called = True
        learning = {id(parameter) for parameter in slot.parameters()}
        frozen: dict[str, Tensor] = {
            name: parameter.detach()
            for name, parameter in garden.named_parameters()
            if id(parameter) not in learning
        }
        frozen.update({name: buffer.clone() for name, buffer in garden.named_buffers()})
        devices = {p.device for p in garden.parameters() if p.device.type == "cuda"}
        slot.is_shadowing = slot.was_shadowed = True
        try:
            with torch.random.fork_rng(devices=list(devices)):
                return torch.func.functional_call(garden, frozen, args, kwargs)
        finally:
            slot.is_shadowing = False


def shadow_loss(garden: nn.Module, slot: Slot, closure: Callable[[nn.Module], Tensor]) -> Tensor:
    """Return the loss of one batch with the seed of `slot` fully blended and the rest frozen."""
    shadow = Shadow(garden, slot)
    loss = closure(shadow)
    if not shadow.was_called:
        raise UsageError(
            "the closure must call the model it is given: training_loss(lambda model: "
            "loss(model(x), y)), not the garden itself"
        )
    return loss
