"""Deepen in two real processes (gloo), and the wrappers that it takes or refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from esper.growth.depth.blocks import inner_optimizers, unwrapped
from esper.growth.depth.deepen import Deepen
from esper.leyline.errors import UsageError
from tests.growth.depth.models import make_gpt, tokens, train
from tests.growth.two_processes import WORLD, run_in_two

STEPS = 8
SCENARIOS = (
    "ddp",
    "ddp_that_finds_unused_parameters",
    "ddp_with_a_static_graph",
    "ddp_that_is_not_told",
    "fsdp",
    "fsdp_gathers_no_sleeping_block",
    "controllers_decide_alike",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two processes say that go through all scenarios together."""
    ended = run_in_two(__name__, tmp_path_factory.mktemp("meeting"), seconds=250)
    return [out + errors for _, out, errors in ended]


def play(folder: str, rank: int) -> None:
    """Go through the scenarios in one of the processes; the first that fails is the last."""
    torch.set_num_threads(1)
    for name in SCENARIOS:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=60),
        )
        globals()[name](rank)
        dist.barrier()
        dist.destroy_process_group()
        print(f"{name} went well", flush=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_goes_well_in_two_processes(said: list[str], name: str) -> None:
    assert all(f"{name} went well" in one for one in said), "\n".join(said)


def half_loss(model: Any, step: int) -> Tensor:
    """The loss of this process's half of a batch."""
    batch = tokens(step)[dist.get_rank() :: WORLD]
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone() -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Growths and weights of a run in one process."""
    model = make_gpt(4)
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, total_steps=STEPS)
    train(model, optimizer, 0, STEPS, depth=depth)
    assert depth.is_finished
    return [event["awake"] for event in depth.history], model.state_dict()


def check_same_as_alone(model: nn.Module, depth: Deepen) -> None:
    history, weights = alone()
    assert [event["awake"] for event in depth.history] == history
    own = model.state_dict()
    assert own.keys() == weights.keys()
    for name, value in own.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=name)
    assert all(parameter.requires_grad for parameter in model.parameters())


def ddp(rank: int, **options: Any) -> None:
    """Half of every batch in each process is the whole batch in one."""
    model = make_gpt(4, seed=rank)
    model.load_state_dict(make_gpt(4).state_dict())
    wrapped = DistributedDataParallel(model, **options)
    optimizer = sgd(model)
    depth = Deepen(wrapped, optimizer, total_steps=STEPS)
    train(wrapped, optimizer, 0, STEPS, depth=depth, loss_of=half_loss)
    check_same_as_alone(model, depth)
    alone_depth = Deepen(other := make_gpt(4), sgd(other), example=tokens(0)[:2, :-1])
    assert depth.history[0]["flops"] == 2 * alone_depth._compute.per_step({"blocks": 1})


def ddp_that_finds_unused_parameters(rank: int) -> None:
    ddp(rank, find_unused_parameters=True)
    # Then it is enough to know the model inside.
    model = make_gpt(4)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, total_steps=STEPS)
    train(wrapped, optimizer, 0, STEPS, depth=depth, loss_of=half_loss)
    check_same_as_alone(model, depth)


def ddp_with_a_static_graph(rank: int) -> None:
    ddp(rank, static_graph=True, gradient_as_bucket_view=True)


def ddp_that_is_not_told(rank: int) -> None:
    problem = r"Deepen\(wrapper, \.\.\., example=batch\), or make the wrapper with find_un"
    for options in ({}, {"example": tokens(0)[:, :-1]}):
        model = make_gpt(4)
        wrapped = DistributedDataParallel(model)
        depth = Deepen(model, sgd(model), total_steps=STEPS, **options)
        with pytest.raises(UsageError, match=problem):
            half_loss(wrapped, 0)
        assert not depth.is_finished
    # With the wrapper an example is as good as the first batch.
    model = make_gpt(4)
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    depth = Deepen(wrapped, optimizer, total_steps=STEPS, example=tokens(0)[:2, :-1])
    train(wrapped, optimizer, 0, STEPS, depth=depth, loss_of=half_loss)
    check_same_as_alone(model, depth)
    assert not any(part._forward_pre_hooks for part in wrapped.modules())


def sharded(layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = make_gpt(layers)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp(rank: int) -> None:
    model = sharded(4)
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, total_steps=STEPS)
    train(model, optimizer, 0, STEPS, depth=depth, loss_of=half_loss)
    check_same_as_alone(model, depth)


def fsdp_gathers_no_sleeping_block(rank: int) -> None:
    counts = []
    for layers in (4, 1):
        model = sharded(layers)
        optimizer = sgd(model)
        if layers > 1:
            Deepen(model, optimizer, total_steps=100, example=tokens(0)[:, :-1])
        train(model, optimizer, 0, 1, loss_of=half_loss)
        with mock.patch.object(
            _fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather
        ) as gather:
            train(model, optimizer, 1, 2, loss_of=half_loss)
        counts.append(gather.call_count)
    assert counts[0] == counts[1] > 0, counts


def controllers_decide_alike(rank: int) -> None:
    model = make_gpt(4)
    depth = Deepen(
        model,
        sgd(model),
        controller="plateau",
        total_steps=100,
        example=tokens(0)[:, :-1],
    )
    # Only the mean over processes is on a plateau.
    for step in range(100):
        depth.step(3.0 + (step / 50 if rank else -step / 50))
    assert [event["step"] for event in depth.history] == [10, 20]


# -- in one process -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FullyShardedDataParallel", r"shard it by torch\.distributed\.fsdp\.fully_shard instead"),
        ("DataParallel", "wrap it in DistributedDataParallel instead"),
        ("DeepSpeedEngine", "train it under DistributedDataParallel or fully_shard"),
    ],
)
def test_other_wrappers_are_refused_by_name(name: str, problem: str) -> None:
    wrapper = type(name, (nn.Module,), {})()
    wrapper.module = make_gpt()
    with pytest.raises(UsageError, match=f"cannot sleep in {name}; {problem}"):
        unwrapped(wrapper)


def test_optimizers_that_keep_no_state_per_parameter_are_refused_by_name() -> None:
    model = make_gpt()
    with pytest.raises(UsageError, match="under LBFGS, because it keeps one flat state"):
        Deepen(model, torch.optim.LBFGS(model.parameters()), total_steps=3)
    with pytest.raises(UsageError, match="got str"):
        inner_optimizers(["adam"])  # type: ignore[list-item]


def test_compiled_models_are_unwrapped() -> None:
    model = make_gpt()
    assert unwrapped(torch.compile(model, backend="eager"))[-1] is model
