"""A step of stacked networks against PyTorch's own, and what it says about gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.training import OptimizerName, TrainingConfig, build_optimizer
from esper.lab.population.parameter_stack import ParameterStack
from esper.lab.population.seed_stacks import GATE as GATES
from esper.lab.population.train_step import RowTraining, TrainStep, gate_pairs, learning_entries
from esper.leyline.stages import AlphaMode, SeedStage
from tests.lab.population.seed_states import GATE, OTHER, SPEC, make_seed_stacks, make_state, put

MLP, LORA = BLUEPRINTS.get("mlp"), BLUEPRINTS.get("lora")


OWN: list[dict[str, float]] = [
    {"learning_rate": 0.1, "weight_decay": 0.01, "momentum": 0.9, "max_grad_norm": 1.0},
    {"learning_rate": 0.02, "weight_decay": 0.0, "momentum": 0.5, "max_grad_norm": 0.1},
    {"learning_rate": 0.3, "weight_decay": 0.2, "momentum": 0.0, "max_grad_norm": 0.0},
]
"""Rows that share nothing but their architecture."""


def make_hosts(rows: int, *, has_squares: bool = False) -> tuple[ParameterStack, list[nn.Linear]]:
    networks = [nn.Linear(3, 2).double() for _ in range(rows)]
    shapes = {name: p.shape for name, p in networks[0].named_parameters()}
    stack = ParameterStack(shapes, torch.float64, torch.device("cpu"), has_squares=has_squares)
    stack.resize([], rows)
    stack.fill([dict(network.named_parameters()) for network in networks])
    return stack, networks


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hosts_learn_as_with_pytorchs_optimizer(optimizer: OptimizerName) -> None:
    torch.manual_seed(0)
    hosts, networks = make_hosts(3, has_squares=optimizer == "adamw")
    seed_stacks, state = make_seed_stacks(3), make_state(3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        out = torch.einsum("roi,rbi->rbo", hosts.leaves["weight"], x)
        return (out + hosts.leaves["bias"][:, None] - y).square().mean((1, 2))

    step = TrainStep(hosts, seed_stacks, losses)
    settings = [TrainingConfig(optimizer=optimizer, **own) for own in OWN]  # type: ignore[arg-type]
    step.begin(state, RowTraining.of(settings, [1] * 3, [9] * 3, state.learned.tolist()))
    optimizers = [
        build_optimizer(s, n.parameters()) for s, n in zip(settings, networks, strict=True)
    ]
    addresses = set()
    for _ in range(4):
        x, y = torch.randn(3, 5, 3).double() * 3, torch.randn(3, 5, 2).double()
        step.run(x, y)
        # A captured step writes its gradients where the step before it had them.
        addresses.add(step._gradients[0].data_ptr())
        norms, seeds = step.keep_gradients()()
        assert seeds == []
        for row, (network, plain) in enumerate(zip(networks, optimizers, strict=True)):
            plain.zero_grad()
            loss = (network(x[row]) - y[row]).square().mean()
            loss.backward()
            torch.testing.assert_close(step.loss[row], loss.detach().float())
            limit = settings[row].max_grad_norm
            norm = nn.utils.clip_grad_norm_(network.parameters(), limit or torch.inf)
            torch.testing.assert_close(norms[row], norm)
            plain.step()
    for row, network in enumerate(networks):
        values, moments = hosts.read(row)
        torch.testing.assert_close(values["weight"], network.weight.detach())
        assert set(moments.steps.values()) == ({4} if optimizer == "adamw" else set())
    assert len(addresses) == 1


def test_settings_become_values_of_rows_and_seeds() -> None:
    settings = [TrainingConfig(**OWN[0]), TrainingConfig(**OWN[1], schedule="cosine")]  # type: ignore[arg-type]
    settings[1] = settings[1].replace(seed_rate="own", seed_factor=2.0)
    rows = RowTraining.of(settings, [5, 9], [10, 12], [[0, 4], [0, 3]])
    assert rows.rates[0] == 0.1
    assert rows.seed_rates[0].tolist() == [0.1, 0.1]
    assert 0 < rows.rates[1] < 0.01 < rows.seed_rates[1, 1] < rows.seed_rates[1, 0] == 0.04
    assert rows.decays.tolist() == [0.01, 0.0]
    assert rows.momenta.tolist() == [0.9, 0.5]
    assert rows.clips.tolist() == [1.0, 0.1]


def test_every_seed_and_gate_learns_as_its_own_row_and_slot_do() -> None:
    hosts, _ = make_hosts(3)
    seed_stacks = make_seed_stacks(3, (SPEC, OTHER))
    state = put(put(make_state(3, 2), 2, "mlp", algorithm=GATE), 1, "mlp", slot=1)
    seed_stacks.sync(state)
    step = TrainStep(hosts, seed_stacks, lambda x, y: x)
    settings = [TrainingConfig(**own) for own in OWN]  # type: ignore[arg-type]
    rows = RowTraining.of(settings, [1] * 3, [9] * 3, state.learned.tolist())
    seed_rates = np.arange(1.0, 7.0).reshape(3, 2)
    step.begin(state, dataclasses.replace(rows, seed_rates=seed_rates))
    owners = [(stack.slot, row) for stack in step.stacks for row in stack.rows]
    # The gate of a slot comes before its seeds.
    assert owners == [(0, 2), (0, 2), (1, 1)]
    how = step._training
    assert how.rates.tolist() == [0.1, 0.02, 0.3, 5.0, 5.0, 4.0]
    assert how.decays.tolist() == [0.01, 0.0, 0.2, 0.2, 0.2, 0.0]
    assert how.momenta.tolist() == [0.9, 0.5, 0.0, 0.0, 0.0, 0.5]
    assert how.clips.tolist() == [1.0, 0.1, 0.0, 0.0, 0.0, 0.1]


def test_a_seed_and_its_gate_are_clipped_together() -> None:
    hosts, _ = make_hosts(2)
    seed_stacks = make_seed_stacks(2)
    state = put(make_state(2), 1, "mlp", algorithm=GATE)
    seed_stacks.sync(state)
    grown = [stack.parameters for stack in seed_stacks.stacks]

    def losses(x: Tensor, y: Tensor) -> Tensor:
        seeds = sum(leaf.sum() for stack in grown for leaf in stack.leaves.values())
        return hosts.leaves["weight"].sum((1, 2)) + torch.stack([torch.zeros(()), seeds])

    step = TrainStep(hosts, seed_stacks, losses)
    how = TrainingConfig(learning_rate=0.5, momentum=0.0, weight_decay=0.0, max_grad_norm=0.1)
    step.begin(state, RowTraining.of([how] * 2, [1] * 2, [9] * 2, state.learned.tolist()))
    stacks = [hosts, *grown]
    before = [stack.flat.clone() for stack in stacks]
    step.run(torch.zeros(2, 1), torch.zeros(2, 1))
    host, gate, seed = (stack.flat - old for stack, old in zip(stacks, before, strict=True))
    torch.testing.assert_close(host.norm(dim=1), torch.full((2,), 0.05).double())
    assert min(gate.norm(), seed.norm()) > 0
    torch.testing.assert_close(torch.cat([gate, seed], 1).norm(), torch.tensor(0.05).double())


def test_a_step_is_for_the_layout_of_its_time() -> None:
    hosts, _ = make_hosts(3)
    seed_stacks = make_seed_stacks(3)
    step = TrainStep(hosts, seed_stacks, lambda x, y: x)
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
