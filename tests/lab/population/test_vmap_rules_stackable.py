"""What can be stacked is tried out; what cannot says why in one sentence."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_by_id, selectable
from esper.lab.population.engine import SlotSpec
from esper.lab.population.vmap_rules import host_problem, seed_problem, stacked_attention
from esper.leyline.slots import TOPOLOGIES, Topology
from tests.lab.population.plugins import (
    Broken,
    Counting,
    Deciding,
    Differing,
    Drawing,
    Dropping,
    Normalising,
    Odd,
    OddConfig,
    OddHost,
    OddSeed,
    Unwilling,
    Widening,
    plugged_in,
)

X = torch.randn(4, 6)
SHAPES: dict[Topology, tuple[int, ...]] = {
    "cnn": (2, 4, 5, 5),
    "sequence": (2, 5, 8),
    "vector": (2, 6),
}


def slot(topology: Topology) -> SlotSpec:
    shape = SHAPES[topology]
    return SlotSpec("r0c0", "body", topology, shape, shape[1 if topology == "cnn" else -1])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_blueprint_that_ships_can_be_stacked(topology: Topology) -> None:
    for choice in selectable(topology):
        assert seed_problem(blueprint_by_id(choice), slot(topology)) is None


CASES: list[tuple[type[Odd], str]] = [
    (Normalising, "'norm' is a BatchNorm, whose statistics change in place"),
    (Dropping, "'drop' draws random numbers, which must come from each row's own stream"),
    (Drawing, "RuntimeError: vmap: called random operation"),
    (Deciding, "RuntimeError: vmap: It looks like you're"),
    (Differing, "its buffer 'noise' differs between rows, which share all buffers"),
    (Counting, "its buffer 'calls' changes in a forward pass, and rows share all buffers"),
    (Broken, "KeyError: 'not today'"),
]


@pytest.mark.parametrize(("module", "reason"), CASES)
def test_a_host_that_cannot_be_stacked_says_why(module: type[Odd], reason: str) -> None:
    problem = host_problem([module(), module()], X)
    assert problem is not None
    assert problem.startswith(reason)
    assert "\n" not in problem
    assert len(problem) <= 200


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        *CASES,
        (Unwilling, "it is written in another language"),
        (Widening, "it turns [2, 6] into [2, 12]"),
    ],
)
def test_a_seed_that_cannot_be_stacked_says_why(module: type[Odd], reason: str) -> None:
    with plugged_in(odd=module):
        problem = seed_problem(BLUEPRINTS.get("odd"), slot("vector"))
    assert problem is not None
    assert problem.startswith(reason)


def test_odd_habits_that_do_no_harm_are_stacked() -> None:
    hosts = [OddHost(OddConfig()), OddHost(OddConfig())]
    assert host_problem(hosts, torch.randn(4, 5)) is None
    with plugged_in(odd=OddSeed):
        assert seed_problem(BLUEPRINTS.get("odd"), slot("vector")) is None


def test_nothing_is_drawn_from_the_callers_numbers() -> None:
    state = torch.get_rng_state()
    with plugged_in(odd=Odd):
        assert seed_problem(BLUEPRINTS.get("odd"), slot("vector")) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_complaint_about_attention_is_silenced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torch.randn(2, 3, 4, 5)
        with stacked_attention():
            torch.vmap(F.scaled_dot_product_attention)(q, q, q)
            with pytest.raises(UserWarning, match="another"):
                warnings.warn("another matter", UserWarning, stacklevel=1)
