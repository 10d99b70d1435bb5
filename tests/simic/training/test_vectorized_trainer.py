from __future__ import annotations

import dataclasses
import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.problems.graded import GradedProblem
from esper.lab.tasks import FAMILIES, Axes, Family, get_family, register_family
from esper.lab.tasks.presets import Digits
from esper.leyline.errors import CheckpointError, UsageError
from esper.simic.agent import ppo
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.objective import Targets, make_targets
from esper.simic.agent.rollout_buffer import compute_gae
from esper.simic.rewards import RewardConfig, RewardStep, Transition
from esper.simic.training.config import StageConfig, TrainConfig
from esper.simic.training.episodes import TwinCurves
from esper.simic.training.evaluation import Evaluator
from esper.simic.training.progress import Progress, Tally
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.networks.config import PolicyConfig
from esper.utils.process import resident_bytes
from tests.plots import same
from tests.simic.training.tiny import NAME, tiny_config

STEPS = 10


def make_trainer(**changes: Any) -> Trainer:
    problem = GradedProblem(8, steps=STEPS)
    config = TrainConfig(
        rounds=4,
        rows=8,
        episode_length=STEPS,
        device="cpu",
        policy=PolicyConfig(lstm_hidden_dim=8, initial_op_bias=(0.0,) * 6),
        ppo=PPOConfig(epochs=2),
    ).replace(**changes)
    return Trainer(config, environment=problem, reward=problem.reward)


def lasting(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the times in it."""
    kept = {name: value for name, value in state.items() if name != "twin_seconds"}
    if kept["rollout"] is not None:
        kept["rollout"] = {k: v for k, v in kept["rollout"].items() if k != "timings"}
    return kept


def test_twins_trained_beside_the_rows_of_the_round_before_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, twin_epochs = [], []
    for is_beside in (False, True):
        monkeypatch.setattr(TwinCurves, "fit_beside_rows", is_beside)
        trainer = Trainer(tiny_config(rounds=3, episode_length=5))
        seen = [each.round for each in trainer.train() if each.phase == "twins"]
        ends.append(lasting(trainer.state_dict()))
        twin_epochs.append([seen.count(number) for number in range(3)])
        trainer.close()
    assert same(*ends)
    # An epoch in the reset and one in each of five steps: none is left.
    assert twin_epochs == [[6, 6, 6], [6, 0, 0]]


def test_rounds_are_reported_until_the_end() -> None:
    trainer = make_trainer(rounds=3)
    reports = list(trainer.run())
    assert [report.round for report in reports] == [0, 1, 2]
    assert [report.env_steps for report in reports] == [80, 160, 240]
    assert trainer.is_done
    assert list(trainer.run()) == []


def test_some_rounds_can_be_asked_for() -> None:
    trainer = make_trainer()
    assert len(list(trainer.run(2))) == 2
    assert not trainer.is_done
    assert list(trainer.run(0)) == []
    assert [report.round for report in trainer.run()] == [2, 3]


def test_every_step_is_told() -> None:
    steps = list(make_trainer(rounds=1).train())
    assert [step.phase for step in steps] == ["rollout"] * STEPS + ["update"]
    assert [step.step for step in steps[:-1]] == list(range(1, STEPS + 1))
    assert steps[3].env_steps == 32
    assert sum(steps[0].op_counts.values()) == steps[0].active == 8
    assert steps[-1].report is not None
    shares = [step.done_share for step in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_policy_changes_between_rounds_and_not_within() -> None:
    trainer = make_trainer(rounds=1)
    before = {k: v.clone() for k, v in trainer.policy.network.state_dict().items()}
    mean = trainer.policy.normalizer.mean.clone()
    for progress in trainer.train():
        changed = not same(before, dict(trainer.policy.network.state_dict()))
        seen = not torch.equal(mean, trainer.policy.normalizer.mean)
        assert changed == seen == (progress.phase == "update")


def test_the_first_round_teaches_what_was_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """On real networks, which pay rent long before they gain anything."""
    taught: list[Targets] = []

    def spy(*arguments: Any, **options: Any) -> Targets:
        taught.append(make_targets(*arguments, **options))
        return taught[-1]

    monkeypatch.setattr(ppo, "make_targets", spy)
    trainer = Trainer(tiny_config(rounds=1, rows=8, episode_length=14))
    (report,) = trainer.run()
    trainer.close()
    batch, gamma = trainer.buffer.batch(), trainer.config.ppo.gamma
    exact, _ = compute_gae(
        report.outcome.decisions["reward"],
        -batch.potentials,
        -trainer.buffer.next_potentials(),
        batch.terminated,
        batch.truncated,
        gamma,
        trainer.config.ppo.gae_lambda,
    )
    both = torch.stack([exact[batch.usable], taught[0].raw_advantages[batch.usable]])
    assert float(torch.corrcoef(both)[0, 1]) >= 0.95


@pytest.mark.parametrize("layout", ["documents", "travelling"])
def test_after_the_first_round_whatever_varies_is_standardised(layout: str) -> None:
    config = tiny_config(rounds=1, rows=8, episode_length=14)
    trainer = Trainer(config.replace(policy=config.policy.replace(layout=layout)))
    list(trainer.run())
    trainer.close()
    batch = trainer.buffer.batch()
    raw = batch.raw_states[batch.valid]
    # Slots share their statistics, so that not every one of them has a deviation of 1.
    host = trainer.policy.layout.parts[0].size
    measured = [spec.kind == "continuous" for spec in trainer.policy.layout.specs]
    measured[host:] = [False] * (len(measured) - host)
    varies = torch.tensor(measured) & (raw.std(0) > 1e-3)
    deviations = trainer.policy.normalizer.normalize(raw)[:, varies].std(0)
    assert int(varies.sum()) > 20
    assert 0.3 < float(deviations.min()) < float(deviations.max()) < 3.0


def test_what_a_rollback_pays_teaches_no_scale() -> None:
    scales = []
    for paid in (0.0, -50.0):
        trainer = make_trainer(rounds=1)
        step, reward = trainer.row_source.environment(0, 0).step, trainer.reward

        def roll_back(actions: Any, step: Any = step) -> Any:
            signals = step(actions)
            rolled_back = torch.arange(8) == 3
            return dataclasses.replace(signals, rolled_back=rolled_back)

        def pay(transition: Any, paid: float = paid, inner: Any = reward.step) -> RewardStep:
            terms = dict(inner(transition).terms)
            terms["rollback"] = torch.where(transition.after.rolled_back, paid, 1.0)
            return RewardStep(terms=terms)

        trainer.row_source.environment(0, 0).step = roll_back  # type: ignore[method-assign]
        trainer.reward.step = pay  # type: ignore[method-assign]
        list(trainer.run())
        scales.append(trainer.agent.reward_scales.state_dict())
    assert same(*scales)


def test_reports_say_where_the_run_stands() -> None:
    trainer = make_trainer(rounds=12)
    patience = trainer.config.ppo.exploration.patience
    tally = Tally(patience, trainer.policy.blueprint_names)
    for report in trainer.run():
        tally.add(report.outcome)
        assert report.score_rolling == tally.score_rolling
        assert report.merit_rolling == tally.merit_rolling
        assert report.is_best
        assert (report.env_steps, report.paid_off) == (tally.env_steps, tally.paid_off)
    assert trainer.tally.state_dict() == tally.state_dict()
    assert tally.fates


@pytest.mark.parametrize("stop", [1, 5, STEPS, STEPS + 1, STEPS + 4])
def test_a_run_goes_on_exactly_from_any_step(stop: int) -> None:
    whole, halted = make_trainer(), make_trainer()
    list(whole.run())
    for count, _ in enumerate(halted.train(), 1):
        if count == stop:
            break
    state = halted.state_dict()
    other = make_trainer()
    other.load_state_dict(state)
    assert same(lasting(other.state_dict()), lasting(state))
    list(other.run())
    assert same(lasting(other.state_dict()), lasting(whole.state_dict()))


def test_a_run_with_a_travelling_policy_goes_on_exactly() -> None:
    policy = PolicyConfig(layout="travelling", lstm_hidden_dim=8, slot_width=8)
    whole, halted, other = (make_trainer(policy=policy) for _ in range(3))
    list(whole.run())
    for count, _ in enumerate(halted.train(), 1):
        if count == STEPS + 4:
            break
    other.load_state_dict(halted.state_dict())
    list(other.run())
    assert same(lasting(other.state_dict()), lasting(whole.state_dict()))


@pytest.mark.parametrize("layout", ["documents", "travelling"])
def test_a_run_on_a_population_goes_on_exactly(layout: str) -> None:
    config = tiny_config()
    config = config.replace(policy=config.policy.replace(layout=layout))
    whole, halted, other = Trainer(config), Trainer(config), Trainer(config)
    list(whole.run())
    for progress in halted.train():
        if progress.phase == "rollout" and progress.round == 1 and progress.step == 5:
            break
    other.load_state_dict(halted.state_dict())
    list(other.run())
    assert same(lasting(other.state_dict()), lasting(whole.state_dict()))
    for trainer in (whole, halted, other):
        trainer.close()


@pytest.fixture
def short_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A family whose members end at different times and have different numbers of slots."""
    brief = Digits.defaults.replace(samples_per_step=64, validation_samples=64)
    monkeypatch.setattr(Digits, "defaults", brief)
    train = Axes(data=("digits",), width=(2,), depth=(1, 2), train_size=(100, 200), horizon=(3, 6))
    select = dataclasses.replace(train, width=(3,), horizon=(4,))
    yield register_family(Family("short_family", "For tests.", train, select)).name
    FAMILIES.unregister("short_family")


def test_members_of_a_family_that_end_at_different_times_are_learned_from(
    short_family: str,
) -> None:
    config = tiny_config(
        tasks=(short_family,),
        rows=8,
        episode_length=5,
        architectures_per_round=2,
        evaluate_every=1,
        evaluation_seeds=4,
    )
    trainer = Trainer(config)
    reports = list(trainer.run())
    trainer.close()
    train = {member.label for member in get_family(short_family).members("train")}
    for report in reports:
        outcome, evaluation = report.outcome, report.evaluation
        assert set(outcome.tasks) <= train
        ends = [int(label.split(" epochs")[0].rpartition(" ")[2]) for label in outcome.tasks]
        assert outcome.active.sum(1).tolist() == [end - 1 for end in ends]
        assert outcome.final_scores.isfinite().all()
        assert outcome.twin_scores.isfinite().all()
        assert evaluation is not None
        assert all("4 epochs" in label and " 3x" in label for label in evaluation.tasks)
        assert evaluation.val_gains.isfinite().all()
    assert {3, 6} == {int(label.split(" epochs")[0].rpartition(" ")[2]) for label in train}


def test_a_round_can_be_played_again_from_its_beginning() -> None:
    halted, other = make_trainer(), make_trainer()
    for count, _ in enumerate(halted.train(), 1):
        if count == STEPS + 3:
            break
    other.load_state_dict(halted.state_dict(), restart_round=True)
    assert (other.round, other.step) == (1, 0)
    assert len(list(other.run())) == 3


def test_a_state_with_other_blueprints_is_refused() -> None:
    state = make_trainer().state_dict()
    state["blueprints"].append("mine")
    with pytest.raises(CheckpointError, match=r"other blueprints \(mine\)"):
        make_trainer().load_state_dict(state)


def test_a_policy_with_too_few_slots_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match=r"policy\.num_slots=3"):
        Trainer(tiny_config(tasks=("digits",)))


def test_a_travelling_policy_is_laid_out_for_the_rows() -> None:
    config = tiny_config(tasks=("digits",))
    trainer = Trainer(config.replace(policy=config.policy.replace(layout="travelling")))
    assert trainer.policy.network.config.num_slots == 3
    assert trainer.policy.slot_config.num_slots == 3
    trainer.close()


def test_a_curriculum_moves_on_by_rounds_and_by_what_pays_off() -> None:
    stages = (
        StageConfig(tasks=("a",), rounds=2),
        StageConfig(tasks=("b",), paid_off=1e-9),
        StageConfig(tasks=("c",)),
    )
    trainer = make_trainer(rounds=6, curriculum=stages)
    reports = list(trainer.run())
    assert [report.stage for report in reports[:3]] == [0, 0, 1]
    for before, after in itertools.pairwise(reports[2:]):
        assert after.stage == (2 if before.paid_off > 0 else 1)
    state = trainer.state_dict()
    other = make_trainer(rounds=6, curriculum=stages)
    other.load_state_dict(state)
    assert other.curriculum.stage == trainer.curriculum.stage


def test_twins_are_trained_where_the_reward_asks_for_them() -> None:
    trainer = Trainer(tiny_config(rounds=1))
    phases: list[Progress] = list(trainer.train())
    twins = [step for step in phases if step.phase == "twins"]
    assert [step.step for step in twins] == list(range(1, 11))
    report = phases[-1].report
    assert report is not None
    assert report.gain_mean is not None
    assert report.timings["twins"] > 0
    trainer.close()


def test_greedy_evaluations_are_played_when_they_are_due() -> None:
    trainer = Trainer(tiny_config(rounds=2, evaluate_every=2, evaluation_seeds=2, episode_length=4))
    first, second = trainer.run()
    assert first.evaluation is None
    assert second.evaluation is not None
    assert len(second.evaluation.returns) == 2
    assert second.evaluation.test_scores.isnan().all()
    # These seeds are for choosing; what is claimed is measured on others.
    claimed = Evaluator(trainer.config, 2).evaluate("wait").seeds
    assert set(second.evaluation.seeds).isdisjoint(claimed)
    trainer.close()


def test_rows_that_grow_are_compared_with_all_twins_of_their_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row's gain is noisy by its own twin's luck; until a seed takes part, its twin is itself."""
    seen: list[Transition] = []
    trainer = Trainer(tiny_config(rounds=1, rows=10, rows_per_seed=1, episode_length=8))
    step = trainer.reward.step
    monkeypatch.setattr(trainer.reward, "step", lambda t: (seen.append(t), step(t))[1])
    (report,) = trainer.run()
    trainer.close()
    own = report.outcome.states["twin_score"]
    scores = report.outcome.states["val_score"]
    parted = torch.zeros(10, dtype=torch.bool)
    acted, were_twins = parted.clone(), 0
    for number, transition in enumerate(seen):
        parted |= (transition.after.alpha > 0).any(1)
        acted |= transition.effective_op != 0
        were_twins += int((acted & ~parted).sum())
        assert torch.equal(transition.twin_after[~parted], own[:, number + 1][~parted])
        # On a CPU it really is: the same network to the bit.
        assert torch.equal(scores[:, number + 1][~parted], own[:, number + 1][~parted])
    assert parted.any()
    assert were_twins > 0, "rows with a seed that does not take part yet"
    last = seen[-1].twin_after[parted]
    assert not torch.allclose(last, own[:, -1][parted])
    # Less far from each other than the twins are.
    assert float(last.var()) < float(own[:, -1][parted].var())


def test_the_best_policy_is_chosen_by_its_greedy_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = iter([1.0, 3.0, 2.0])

    def evaluate(self: Evaluator, policy: Any) -> Any:
        return SimpleNamespace(returns=torch.tensor([next(returns)]), tasks=(NAME,))

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    trainer = Trainer(tiny_config(rounds=5, evaluate_every=2, episode_length=2))
    reports = list(trainer.run())
    trainer.close()
    assert [report.evaluation is not None for report in reports] == [False, True, False, True, True]
    assert [report.is_best for report in reports] == [True, True, False, True, False]


def test_a_given_environment_is_not_evaluated() -> None:
    with pytest.raises(UsageError, match="evaluate_every needs tasks"):
        list(make_trainer(evaluate_every=1).run())


def test_learning_from_the_same_round_is_the_same() -> None:
    one, other = make_trainer(rounds=2), make_trainer(rounds=2)
    first, second = list(one.run()), list(other.run())
    assert first[1].return_mean == second[1].return_mean
    assert first[1].conditional_entropies.keys() == {
        *("op", "slot", "blueprint", "style", "tempo"),
        *("alpha_target", "alpha_speed", "alpha_curve"),
    }
    assert same(lasting(one.state_dict()), lasting(other.state_dict()))


def memory_gained() -> int:
    """Return by how many bytes twenty rounds make this process larger."""
    problem = GradedProblem(16, steps=5)
    config = make_trainer(rounds=30, episode_length=5).config
    sizes = []
    for report in Trainer(config, environment=problem, reward=problem.reward).run():
        if report.round in (9, 29):
            gc.collect()
            sizes.append(resident_bytes() or 0)
    return sizes[1] - sizes[0]


def test_memory_is_flat_over_thirty_rounds() -> None:
    # In a process of its own: what other tests have left may be given back, or not, at any time.
    program = f"from {__name__} import memory_gained; print(memory_gained())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["twin", pytest.param("shaped", marks=pytest.mark.slow)])
def test_thirty_rounds_on_networks_leave_nothing_behind(mode: str) -> None:
    """Seeds, their optimizer states, twins, ledgers and traces all end with their round.

    What PyTorch keeps for every shape that it meets for the first time, half a megabyte or so, is
    not ours.
    """
    config = tiny_config(
        rounds=30,
        rows=1,
        rows_per_seed=1,
        episode_length=3,
        reward=RewardConfig(mode=mode),
        ppo=PPOConfig(epochs=1),
    )
    trainer = Trainer(config)
    tensors, sizes, germinated = [], [], 0
    for report in trainer.run():
        germinated += int(report.outcome.seeds.germinated.sum())
        if report.round in (9, 29):
            # Fresh rows: how many seeds the last round has left must not matter.
            trainer.row_source.environment(report.round, 0).reset()
            gc.collect()
            tensors.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
            sizes.append(resident_bytes() or 0)
    trainer.close()
    assert germinated > 5
    # The best episodes are kept from the first good one on; nothing else may stay.
    assert max(tensors) - min(tensors) < 20, "less than one tensor in two rounds"
    assert sizes[1] - sizes[0] < 32 * 2**20


@pytest.mark.gpu
def test_a_run_on_a_device_goes_on_from_a_state() -> None:
    config = tiny_config(device="cuda", strategy="auto", horizon="bootstrap")
    halted, other = Trainer(config), Trainer(config)
    for progress in halted.train():
        if progress.phase == "rollout" and progress.step == 5:
            break
    other.load_state_dict(halted.state_dict())
    assert other.step == 5
    reports = list(other.run())
    assert [report.round for report in reports] == [0, 1]
    assert all(report.outcome.returns.isfinite().all() for report in reports)
    assert other.policy.network.floors.is_cuda
    for trainer in (halted, other):
        trainer.close()
