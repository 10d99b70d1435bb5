"""A step of stacked networks against PyTorch's own, and what it says about gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.leyline.alpha import AlphaMode
from esper.leyline.stages import SeedStage
from esper.population.parameter_stack import ParameterStack
from esper.population.seed_stacks import GATE as GATES
from esper.population.train_step import TrainStep, gate_pairs, learning_entries
from esper.tasks.task import TrainingConfig
from tests.population.seed_states import GATE, make_seed_stacks, make_state, put

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")
SETTINGS = TrainingConfig(learning_rate=0.1, momentum=0.9, weight_decay=0.01, max_grad_norm=1.0)


def make_hosts(rows: int) -> tuple[ParameterStack, list[nn.Linear]]:
    networks = [nn.Linear(3, 2).double() for _ in range(rows)]
    shapes = {name: p.shape for name, p in networks[0].named_parameters()}
    stack = ParameterStack(shapes, torch.float64, torch.device("cpu"))
    stack.resize([], rows)
    stack.fill([dict(network.named_parameters()) for network in networks])
    return stack, networks


def test_hosts_learn_as_with_pytorchs_optimizer() -> None:
    torch.manual_seed(0)
    hosts, networks = make_hosts(3)
    seed_stacks, state = make_seed_stacks(3), make_state(3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        out = torch.einsum("roi,rbi->rbo", hosts.leaves["weight"], x)
        return (out + hosts.leaves["bias"][:, None] - y).square().mean((1, 2))

    step = TrainStep(hosts, seed_stacks, SETTINGS, losses)
    rates = (0.1, 0.02, 0.3)
    step.begin(state, np.array(rates))
    optimizers = [
        torch.optim.SGD(n.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)
        for n, rate in zip(networks, rates, strict=True)
    ]
    addresses = set()
    for _ in range(4):
        x, y = torch.randn(3, 5, 3).double() * 3, torch.randn(3, 5, 2).double()
        step.run(x, y)
        # A captured step writes its gradients where the step before it had them.
        addresses.add(step._gradients[0].data_ptr())
        norms, seeds = step.keep_gradients()()
        assert seeds == []
        for row, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = (network(x[row]) - y[row]).square().mean()
            loss.backward()
            torch.testing.assert_close(step.loss[row], loss.detach().float())
            norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            torch.testing.assert_close(norms[row], norm)
            optimizer.step()
    for row, network in enumerate(networks):
        torch.testing.assert_close(hosts.read(row)[0]["weight"], network.weight.detach())
    assert len(addresses) == 1


def test_a_step_is_for_the_layout_of_its_time() -> None:
    hosts, _ = make_hosts(3)
    seed_stacks = make_seed_stacks(3)
    step = TrainStep(hosts, seed_stacks, SETTINGS, lambda x, y: x)
    assert step.layout_version == seed_stacks.layout_version
    seed_stacks.sync(put(make_state(3), 1, "mlp"))
    assert step.layout_version != seed_stacks.layout_version


def test_who_learns() -> None:
    seed_stacks = make_seed_stacks(6)
    state = make_state(6)
    lives = [
        (SeedStage.GERMINATED, {}),
        (SeedStage.TRAINING, {}),
        (SeedStage.BLENDING, {}),
        (SeedStage.BLENDING, {"alpha": 0.0}),
        (SeedStage.BLENDING, {"alpha_mode": AlphaMode.DOWN}),
        (SeedStage.FOSSILIZED, {"alpha": 1.0}),
    ]
    for row, (stage, fields) in enumerate(lives):
        state = put(state, row, "mlp", stage, **fields)
    seed_stacks.sync(state)
    (stack,) = seed_stacks.stacks
    assert learning_entries(stack, state).tolist() == [False, True, True, False, False, True]


def test_norms_of_a_gate_belong_to_those_of_its_seed() -> None:
    seed_stacks = make_seed_stacks(4)
    state = put(make_state(4), 0, "mlp", algorithm=GATE)
    state = put(put(state, 1, "lora", algorithm=GATE), 2, "mlp")
    state = put(state, 3, "mlp", algorithm=GATE)
    seed_stacks.sync(state)
    rows = {stack.kind: stack.rows for stack in seed_stacks.stacks}
    assert rows[GATES] == [0, 1, 3]
    assert rows[MLP.id] == [0, 2, 3]
    shared = {
        (gates.kind, seeds.kind): (here.tolist(), there.tolist())
        for gates, seeds, here, there in gate_pairs(seed_stacks)
    }
    assert shared == {(GATES, MLP.id): ([0, 2], [0, 2]), (GATES, LORA.id): ([1], [0])}
