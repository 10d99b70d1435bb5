"""A step of stacked networks against PyTorch's own, and what it says about gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.population.parameter_stack import Stack
from esper.population.train_step import Step
from esper.tasks.task import TrainingConfig
from tests.population.seedlings import make_nursery, make_state, put

SETTINGS = TrainingConfig(learning_rate=0.1, momentum=0.9, weight_decay=0.01, max_grad_norm=1.0)


def make_hosts(rows: int) -> tuple[Stack, list[nn.Linear]]:
    networks = [nn.Linear(3, 2).double() for _ in range(rows)]
    shapes = {name: p.shape for name, p in networks[0].named_parameters()}
    stack = Stack(shapes, torch.float64, torch.device("cpu"))
    for network in networks:
        stack.append(dict(network.named_parameters()), None)
    return stack, networks


def test_hosts_learn_as_with_pytorchs_optimizer() -> None:
    torch.manual_seed(0)
    hosts, networks = make_hosts(3)
    nursery, state = make_nursery(3), make_state(3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        out = torch.einsum("roi,rbi->rbo", hosts.leaves["weight"], x)
        return (out + hosts.leaves["bias"][:, None] - y).square().mean((1, 2))

    step = Step(hosts, nursery, SETTINGS, losses)
    step.begin(state)
    optimizers = [
        torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for n in networks
    ]
    places = set()
    for _ in range(4):
        x, y = torch.randn(3, 5, 3).double() * 3, torch.randn(3, 5, 2).double()
        step.run(x, y)
        # A captured step writes its gradients where the step before it had them.
        places.add(step._gradients[0].data_ptr())
        norms, beds = step.keep_gradients()()
        assert beds == []
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
    assert len(places) == 1


def test_a_step_is_for_the_places_of_its_time() -> None:
    hosts, _ = make_hosts(3)
    nursery = make_nursery(3)
    step = Step(hosts, nursery, SETTINGS, lambda x, y: x)
    assert step.moves == nursery.moves
    nursery.sync(put(make_state(3), 1, "mlp"))
    assert step.moves != nursery.moves
