"""Clones of a search's schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.lab.population.engine import PopulationConfig
from esper.lab.proof.clone import CloneConfig, Cloner, Lessons, find_taught
from esper.lab.proof.play import PlayConfig, Player
from esper.lab.tasks import get_task
from esper.lab.tasks.member import GivenMember
from esper.leyline.actions import LifecycleOp, causal_table
from esper.leyline.controller import GrowthLimits
from esper.leyline.errors import UsageError
from esper.simic.training.config import LIFE
from esper.tamiyo.controllers.policy_file import load_policy
from esper.tamiyo.networks.config import PolicyConfig

GROWS = ({"epoch": 2, "op": "grow", "slot": "r0c0", "blueprint": "conv_light"},)


def members() -> list[GivenMember]:
    base = get_task("digits")
    made = []
    for name, size in (("large", None), ("small", 100)):
        config = base.config.replace(
            train_size=size, samples_per_step=64, validation_samples=32, horizon=8
        )
        made.append(GivenMember(name, type(base)(config)))
    return made


def make(folder: Path, stop_after: int = 10**9, **changes: Any) -> Cloner:
    told: list[float] = []
    play = PlayConfig(
        strategy="sequential",
        device="cpu",
        population=PopulationConfig(
            lifecycle=LIFE.replace(gates=LIFE.gates.replace(min_training_epochs=1))
        ),
    )
    options: dict[str, Any] = {"rounds": 2, "episodes": 6, "passes": 40, "learning_rate": 1e-2}
    config = CloneConfig(
        policy=PolicyConfig(lstm_hidden_dim=32, layout="travelling", slot_width=16),
        play=play,
        **{**options, **changes},
    )
    plans = {"large": GROWS, "small": ()}
    folder.mkdir(exist_ok=True)
    return Cloner(
        config,
        members(),
        plans,
        folder,
        Player(play),
        lambda progress: told.append(progress.done),
        lambda: len(told) >= stop_after,
    )


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cloner]:
    folder = tmp_path_factory.mktemp("clone")
    cloner = make(folder)
    assert cloner.run()
    return folder, cloner


def test_it_does_what_the_schedules_do_by_what_it_sees(cloned: tuple[Path, Cloner]) -> None:
    folder, cloner = cloned
    first, second = cloner.history
    assert first["teacher_share"] == 1.0
    assert second["teacher_share"] == 0.5
    assert first["clone_score"] is None
    assert second["clone_score"] is not None
    loss = second["loss"]
    assert loss is not None
    assert loss < 0.2
    told = json.loads((folder / "clone.json").read_text())
    assert told["members"] == ["large", "small"]
    policy = load_policy(folder)
    assert policy.travels
    play = cloner.config.play
    assert policy.limits == GrowthLimits(parameters=play.param_limit, flops=play.flop_limit)
    assert policy.horizon == 8


def test_what_counts_is_a_choice_and_what_is_wanted_is_legal(cloned: tuple[Path, Cloner]) -> None:
    lessons = cloned[1]._lessons[0]
    wanted = lessons.masks.gather(-1, lessons.actions.unsqueeze(-1)).squeeze(-1)
    matters = causal_table()[lessons.actions[..., -1]] & lessons.counts.unsqueeze(-1)
    assert bool(wanted[matters].all())
    ops = lessons.actions[..., -1][lessons.counts].unique().tolist()
    assert {int(LifecycleOp.WAIT), int(LifecycleOp.GERMINATE)} <= set(ops)


@pytest.mark.slow
def test_a_clone_that_was_stopped_goes_on_to_the_same_end(
    tmp_path: Path, cloned: tuple[Path, Cloner]
) -> None:
    for stop_after in (3, 20, 52):
        assert not make(tmp_path / "run", stop_after).run()
    again = make(tmp_path / "run")
    assert again.run()
    assert again.history == cloned[1].history


def test_a_round_of_fewer_episodes_than_members_draws_other_members_each_time(
    tmp_path: Path,
) -> None:
    cloner = make(tmp_path / "few", episodes=1)
    drawn = [[cell.member.label for cell in cloner._cells(number)] for number in range(12)]
    assert all(len(labels) == 1 for labels in drawn)
    assert {labels[0] for labels in drawn} == {"large", "small"}
    cells = make(tmp_path / "many", episodes=5)._cells(0)
    assert sorted(len(cell.seeds) for cell in cells) == [2, 3]


def test_episodes_of_different_length_are_joined() -> None:
    def lessons(steps: int) -> Lessons:
        return Lessons(
            states=torch.ones(2, steps, 3),
            blueprints=torch.zeros(2, steps, 1, dtype=torch.int64),
            actions=torch.zeros(2, steps, 8, dtype=torch.int64),
            masks=torch.ones(2, steps, 8, 4, dtype=torch.bool),
            counts=torch.ones(2, steps, dtype=torch.bool),
        )

    joined = Lessons.join([lessons(3), lessons(5)])
    assert joined.states.shape == (4, 5, 3)
    assert joined.counts.sum(1).tolist() == [3, 3, 5, 5]
    assert bool(joined.masks.all())


def test_members_without_a_schedule_are_refused() -> None:
    with pytest.raises(UsageError, match="no member has a schedule"):
        find_taught(members(), {"another": ()})


def test_a_smoothed_clone_is_less_certain_and_wants_the_same(
    tmp_path: Path, cloned: tuple[Path, Cloner]
) -> None:
    def chances(cloner: Cloner) -> tuple[torch.Tensor, torch.Tensor]:
        policy, lessons = cloner._policy, cloner._lessons[0]
        assert policy is not None
        with torch.no_grad():
            scores = policy.network.score(
                policy.normalizer.normalize(lessons.states),
                lessons.blueprints,
                lessons.actions,
                lessons.masks,
                explore=False,
                with_baseline=False,
            )
        op = scores.logits[..., -1, :].masked_fill(~scores.masks[..., -1, :], -torch.inf)
        most = op.softmax(-1).max(-1)
        return most.values[lessons.counts], most.indices[lessons.counts]

    soft = make(tmp_path / "soft", rounds=1, smoothing=0.2)
    assert soft.run()
    (certain, hard), (open_, same) = chances(cloned[1]), chances(soft)
    assert float(open_.mean()) < float(certain.mean()) - 0.05
    assert float((hard == same).float().mean()) > 0.9
