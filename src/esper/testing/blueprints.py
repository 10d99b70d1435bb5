"""The conformance checks of blueprints, for every slot that a blueprint fits."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BLUEPRINTS, count_parameters
from esper.kasmina.costs import count_seed
from esper.kasmina.flops import HOW_TO_COUNT, count_flops
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.lifecycle import TrainingMode
from esper.leyline.slots import NOOP, USUAL_AXES
from esper.leyline.stages import BlendStyle
from esper.testing.blueprint_case import BATCH, SLOT, Case, empty_garden, stir

STEPS = 3
"""Optimizer steps within which every parameter must get a gradient."""

LARGEST_RATIO = 20.0
"""Largest ratio of a new seed's gradient to the host's, both as RMS per parameter.

On the hosts of these checks sound seeds stay below 12. A zero in front of a norm, which multiplies
its first gradient by 1 / sqrt(eps) = 316, gives 40 (behind three layers) to 200 (behind one).
"""

NO_VMAP = "no_vmap"
"""Class attribute with one sentence on why a seed cannot run under `torch.vmap`."""

_MODES: tuple[TrainingMode, ...] = ("straight_through", "shadow")
_DRAWS = 8
"""Initialisations within which every parameter must get a gradient: in one of four, both units of a
narrow ReLU layer are negative for a whole batch, which is only bad luck."""

_STACKED = 3
_ROUNDING = 1e-5


def check_blueprint(name: str, *, channels: Sequence[int] = (4, 8, 32)) -> None:
    """Raise AssertionError if a registered blueprint breaks the contract of seeds.

    The checks run for each of its topologies, each width and each blend style, in small hosts:

    * as a module: it keeps shape and dtype; it is the identity at the start if it promises so; it
      changes neither its input nor its buffers; on a sequence it is causal, unless its attribute
      `is_causal` is False; equal random streams build equal weights, also on the meta device;
      `state_dict`, `deepcopy`, bfloat16, autocast, and `torch.vmap` over stacked parameters work
      (or `no_vmap` says in a sentence why not);
    * in TRAINING, in both modes: outputs and gradients of the host are bit-equal to those of the
      host alone; some parameter of the seed gets a gradient from the first batch and every one
      within three, none of them out of scale with the host's;
    * blended: at alpha = 0 it is bit-equal to the host; at alpha = 1 every parameter before the
      slot gets a gradient; saving, loading and copying make no difference.

    A parameter fails only if it gets no gradient with any of eight initialisations. Blueprints that
    copy blocks (`kin`) are checked as copies of residual blocks: blended in, and at full amplitude
    from the first step against a host that has the block twice.

    Args:
        name: The name it is registered under.
        channels: Widths to try.
    """
    empty_garden.cache_clear()  # another blueprint may have been registered since
    blueprint = BLUEPRINTS.get(name)
    for topology in blueprint.topologies:
        for width in channels:
            case = Case(blueprint, topology, width)
            case.run("as a module", _check_module)
            if topology == "sequence":
                case.run("causality", _check_module_causality)
            case.run("copies", _check_copies)
            case.run("vmap", _check_vmap)
            case.run("bfloat16", _check_module_bfloat16)
            if blueprint.id == NOOP:
                continue
            case.run("parameters", _check_parameters)
            for style in BlendStyle:
                _check_in_garden(case, style)
            if blueprint.is_copy:
                case.run("at once", _check_at_once)


# -- the module by itself -------------------------------------------------------------------------


def _check_module(case: Case) -> None:
    x = case.activation()
    for training in (True, False):
        seed = case.build().train(training)
        given, buffers = x.clone(), [buffer.clone() for buffer in seed.buffers()]
        stream = torch.get_rng_state()
        out = seed(given)
        _require_like(case, out, x)
        case.require(
            torch.equal(torch.get_rng_state(), stream),
            "a forward pass draws random numbers, which shifts those of the host",
        )
        case.require(torch.equal(given, x), "it changes its input in place; work on a copy")
        same = all(map(torch.equal, seed.buffers(), buffers))
        case.require(same, "a forward pass changes its buffers; use a norm without statistics")
        if case.topology in case.blueprint.identity_at_start:
            case.require(
                torch.equal(out, x),
                "it promises the identity at the start but changes its input; start its output "
                "scale at zero or name the topologies that promise it in identity_at_start",
            )
    _require_like(case, case.build().double()(x.double()), x.double())
    first, again = case.build(), case.build()
    case.require(
        all(map(torch.equal, first.parameters(), again.parameters())),
        "two builds from one random stream differ; draw from PyTorch's global generator",
    )


def _check_parameters(case: Case) -> None:
    seed = case.build()
    case.require(
        any(parameter.requires_grad for parameter in seed.parameters()),
        "it has no trainable parameter",
    )
    wanted = sum(p.numel() for p in seed.parameters() if p.requires_grad)
    if case.blueprint.is_copy:
        view = case.garden(BlendStyle.LINEAR_ADD).slots[SLOT]
        work = count_flops(seed, case.activation()).total // BATCH
        case.require(
            (view.parameters, view.flops) == (wanted, work),
            f"a copy with {wanted} parameters and {work} operations counts as {view.parameters} "
            f"and {view.flops}",
        )
        return
    counted = count_parameters(case.blueprint, case.channels, case.topology)
    case.require(counted == wanted, f"it has {wanted} parameters, but {counted} on the meta device")
    count = count_seed(case.blueprint, case.topology, tuple(case.activation().shape))
    case.require(
        not count.uncounted,
        f"limits of operations cannot hold for it: the operations of {count.describe_uncounted()} "
        f"cannot be counted, {HOW_TO_COUNT}",
    )


def _check_module_causality(case: Case) -> None:
    seed = case.stirred().eval()
    with torch.no_grad():
        _require_causal(case, seed, case.activation())


def _check_copies(case: Case) -> None:
    seed, loaded = case.stirred(1).eval(), case.build(2).eval()
    loaded.load_state_dict(seed.state_dict())
    _require_equal_copies(case, seed, case.activation(), {"a state_dict": loaded})


def _require_equal_copies(
    case: Case, model: nn.Module, x: Tensor, others: Mapping[str, nn.Module]
) -> None:
    """Require equal outputs of a model, of others by how they were made, and of a deepcopy."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(x)
        for how, other in {**others, "a deepcopy": copied}.items():
            case.require(torch.equal(other(x), expected), f"outputs differ after {how}")
        stir(copied, 3)
        case.require(torch.equal(model(x), expected), "a deepcopy shares its parameters")


def _check_vmap(case: Case) -> None:
    reason = getattr(case.blueprint.module, NO_VMAP, "")
    if reason:
        case.require(isinstance(reason, str), f"{NO_VMAP} must be a sentence, got {reason!r}")
        return
    seeds = [case.stirred(key) for key in range(_STACKED)]
    x = torch.stack([case.activation(key) for key in range(_STACKED)])
    parameters, buffers = torch.func.stack_module_state(seeds)
    base = seeds[0]

    def call(state: dict[str, Tensor], rest: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(base, (state, rest), (row,))
        return out

    with warnings.catch_warnings():
        # Without a batching rule PyTorch loops and warns: slower, but right.
        warnings.filterwarnings("ignore", "There is a performance drop")
        stacked = torch.vmap(call)(parameters, buffers, x)
    looped = torch.stack([seed(row) for seed, row in zip(seeds, x, strict=True)])
    case.require(_close(stacked, looped), "outputs over stacked parameters differ from a loop's")
    if not parameters:
        return
    stacked.square().mean().backward()
    looped.square().mean().backward()
    for name, stack in parameters.items():
        one_by_one = [seed.get_parameter(name).grad for seed in seeds]
        for row, alone in zip(_gradient(stack), one_by_one, strict=True):
            case.require(
                alone is None or _close(row, alone),
                f"gradients of {name} over stacked parameters differ from a loop's",
            )


def _check_module_bfloat16(case: Case) -> None:
    x = case.activation().to(torch.bfloat16)
    seed = case.build().to(torch.bfloat16)
    out = seed(x)
    _require_like(case, out, x)
    if case.topology in case.blueprint.identity_at_start:
        case.require(torch.equal(out, x), "it is not the identity at the start")
    with torch.autocast("cpu", torch.bfloat16):
        out = case.build()(case.activation())
    case.require(out.shape == x.shape, f"under autocast it turns {_shape(x)} into {_shape(out)}")


# -- in a garden ----------------------------------------------------------------------------------


def _check_in_garden(case: Case, style: BlendStyle) -> None:
    case = case.at(f"style {style.name.lower()}")
    for mode in _MODES:
        for rectified in (True, False):
            sign = "non-negative" if rectified else "signed"
            training = partial(_check_training, style=style, mode=mode, rectified=rectified)
            case.run(f"TRAINING in mode {mode!r} on {sign} activations", training)
    case.run("blended", partial(_check_blended, style=style))
    case.run("bfloat16", partial(_check_bfloat16, style=style))


def _check_training(case: Case, style: BlendStyle, mode: TrainingMode, *, rectified: bool) -> None:
    is_moved, waiting = False, None
    for draw in range(_DRAWS):
        garden = case.garden(style, mode, rectified=rectified, draw=draw)
        moved, still = _train(case, garden, case.host(rectified=rectified))
        is_moved |= moved
        waiting = still if waiting is None else waiting & still
        if is_moved and not waiting:
            return
    case.require(is_moved, "no parameter has a gradient at the first batch: it can never learn")
    case.require(
        not waiting,
        f"no gradient within {STEPS} optimizer steps for {', '.join(sorted(waiting or ()))}",
    )


def _train(case: Case, garden: Garden, alone: nn.Module) -> tuple[bool, set[str]]:
    """Train a garden and the host alone for a few steps.

    Returns whether any parameter of the seed got a gradient in the first step, and the parameters
    that got none in any.
    """
    seed = dict(garden.seedbed[0].named_parameters())
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    waiting = {name for name, parameter in seed.items() if parameter.requires_grad}
    is_moved = False
    for step in range(STEPS):
        _check_isolation(case, garden, alone)
        moved = {name for name, parameter in seed.items() if bool(_gradient(parameter).any())}
        waiting -= moved
        if step == 0:
            is_moved = bool(moved)
            _check_scale(case, garden)
        optimizer.step()
        optimizer_alone.step()
    return is_moved, waiting


def _check_isolation(case: Case, garden: Garden, alone: nn.Module) -> None:
    """Run forward and backward of one batch through both networks, and compare them."""
    x, y = case.batch()
    outputs: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        outputs.append(model(x))
        return _loss(outputs[-1], y)

    for module in (garden, alone):
        module.zero_grad(set_to_none=True)
    value = garden.training_loss(loss)
    value.backward()
    expected = alone(x)
    wanted = _loss(expected, y)
    wanted.backward()
    case.require(torch.equal(outputs[0], expected), "the host's outputs change")
    case.require(torch.equal(value, wanted), "the value of the training loss changes")
    with torch.no_grad():
        case.require(torch.equal(garden.eval()(x), alone(x)), "the host's outputs change in eval")
    garden.train()
    pairs = zip(garden.model.named_parameters(), alone.parameters(), strict=True)
    for (name, one), other in pairs:
        same = torch.equal(_gradient(one), _gradient(other))
        case.require(same, f"the gradient of the host's {name} changes")


def _check_scale(case: Case, garden: Garden) -> None:
    gradients = [_gradient(parameter).flatten() for parameter in garden.host_parameters()]
    host = _rms(torch.cat(gradients))
    for name, parameter in garden.seedbed[0].named_parameters():
        ratio = _rms(_gradient(parameter)) / host
        case.require(
            ratio <= LARGEST_RATIO,
            f"the first gradient of {name} is {ratio:.0f} times the host's, at most "
            f"{LARGEST_RATIO:.0f} is sound; does a zero feed a norm?",
        )


def _check_blended(case: Case, style: BlendStyle) -> None:
    x, _ = case.batch()
    untouched: list[str] = []
    for draw in range(_DRAWS):
        fresh, garden = _blended(case, style, draw)
        now = [*_untouched(case, fresh, fresh.model), *_untouched(case, garden, garden)]
        untouched = [name for name in untouched if name in now] if draw else now
        if not untouched:
            break
    case.require(not untouched, f"no gradient for {next(iter(untouched), None)} at alpha = 1")
    if case.topology == "sequence":
        with torch.no_grad():
            _require_causal(case, garden.eval(), x)
    _check_garden_copies(case, garden.eval(), x)


def _blended(case: Case, style: BlendStyle, draw: int) -> tuple[Garden, Garden]:
    """Return two gardens with a seed at alpha = 1: with its initial weights, and with others."""
    x, _ = case.batch()
    fresh = case.garden(style, draw=draw)
    garden = copy.deepcopy(fresh)
    stir(garden.seedbed, draw)
    for one in (fresh, garden):
        result = one.advance(SLOT)
        case.require(result.ok, result.reason)
    expected = case.host()(x)
    case.require(torch.equal(garden(x), expected), "alpha = 0 is not the host to the bit")
    for one in (fresh, garden):
        one.tick()
        case.require(one.slots[SLOT].alpha == 1, "alpha does not reach 1")
    with garden.seedbed.configured(torch.zeros(1, 1, dtype=torch.bool), None):
        case.require(torch.equal(garden(x), expected), "switched off, it still changes the host")
    return fresh, garden


def _check_garden_copies(case: Case, garden: Garden, x: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        garden.save(Path(folder, "garden"))
        loaded = load_garden(Path(folder, "garden"), model=case.host()).eval()
    fresh = Garden(case.host(), [SLOT], x, axes=USUAL_AXES[case.topology], config=garden.config)
    fresh.load_state_dict(garden.state_dict())
    others = {"save and load": loaded, "a state_dict": fresh.eval()}
    _require_equal_copies(case, garden, x, others)


def _check_at_once(case: Case) -> None:
    """Compare a copy at full amplitude with a host that has its block twice."""
    x, y = case.batch()
    host = case.host()
    block = host.get_submodule(SLOT)
    twice = copy.deepcopy(host)
    twice.set_submodule(SLOT, nn.Sequential(copy.deepcopy(block), copy.deepcopy(block)))
    garden = Garden(host, [SLOT], x, axes=USUAL_AXES[case.topology])
    result = garden.germinate(SLOT, case.blueprint.name)
    case.require(result.ok, result.reason)
    case.require(garden.slots[SLOT].alpha == 1, "alpha is not 1 from the first step")
    outputs = garden(x), twice(x)
    case.require(torch.equal(*outputs), "its output is not that of the block applied twice")
    for out in outputs:
        _loss(out, y).backward()
    pairs = zip(_in_order(garden), twice.parameters(), strict=True)
    same = all(torch.equal(_gradient(one), _gradient(other)) for one, other in pairs)
    case.require(same, "its gradients are not those of the block applied twice")


def _in_order(garden: Garden) -> list[nn.Parameter]:
    """Return the parameters in the order from inputs to outputs."""
    parts = [garden.model.get_submodule(name) for name in ("stem", SLOT, "tail")]
    parts.insert(2, garden.seedbed)
    return [parameter for part in parts for parameter in part.parameters()]


def _check_bfloat16(case: Case, style: BlendStyle) -> None:
    x, y = case.batch()
    for cast in (True, False):
        garden, alone = case.garden(style), case.host()
        stir(garden.seedbed)
        if cast:
            garden.to(torch.bfloat16)
            alone.to(torch.bfloat16)
        given = x.to(torch.bfloat16) if cast else x
        where = "cast to bfloat16" if cast else "under autocast"
        for stage in ("TRAINING", "at alpha = 1"):
            garden.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
                out, expected = garden(given), alone(given)
                case.require(
                    out.dtype == expected.dtype,
                    f"{where}, {stage}: the host's {expected.dtype} turns into {out.dtype}",
                )
                if stage == "TRAINING":
                    same = torch.equal(out, expected)
                    case.require(same, f"{where}, {stage}: the host's outputs change")
                _loss(out.float(), y).backward()
            gradients = [_gradient(parameter) for parameter in garden.parameters()]
            case.require(
                all(bool(gradient.isfinite().all()) for gradient in (out, *gradients)),
                f"{where}, {stage}: outputs or gradients are not finite",
            )
            garden.advance(SLOT)
            garden.tick()


# -- helpers --------------------------------------------------------------------------------------


def _require_like(case: Case, out: object, x: Tensor) -> None:
    case.require(isinstance(out, Tensor), f"it returns {type(out).__name__}, not a tensor")
    assert isinstance(out, Tensor)
    case.require(out.shape == x.shape, f"it turns {_shape(x)} into {_shape(out)}")
    case.require(out.dtype == x.dtype, f"it turns {x.dtype} into {out.dtype}")
    case.require(bool(out.isfinite().all()), "its output is not finite")


def _require_causal(case: Case, model: nn.Module, x: Tensor) -> None:
    """Require that changes of the last positions have no effect on earlier ones."""
    before = model(x)
    for position in range(1, x.shape[1]):
        changed = x.clone()
        changed[:, position:] += 1 + torch.arange(x.shape[2])
        case.require(
            _close(model(changed)[:, :position], before[:, :position]),
            f"the output before position {position} changes with the input from there on: "
            "it looks into the future",
        )


def _untouched(case: Case, garden: Garden, part: nn.Module) -> list[str]:
    """Return the parameters of a part of a blended garden that get no gradient."""
    x, y = case.batch()
    _loss(garden(x), y).backward()
    return [
        name.removeprefix("model.")
        for name, parameter in part.named_parameters()
        if parameter.requires_grad and not bool(_gradient(parameter).any())
    ]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _loss(outputs: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), classes.flatten())


def _rms(values: Tensor) -> float:
    return float(values.norm()) / math.sqrt(values.numel())


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
