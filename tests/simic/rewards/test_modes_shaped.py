import pytest
import torch

from esper.kasmina.blueprints.registry import blueprint_by_id, count_parameters, selectable
from esper.leyline.actions import LifecycleOp
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import LIVE_STAGES
from esper.simic.rewards import RewardConfig
from tests.simic.rewards.stories import FADE, Story, close, detail, every_seed, term
from tests.simic.rewards.test_modes_twin import scaffolded

SHAPED = RewardConfig(mode="shaped")
STATE_TERMS = ("attribution", "blending", "holding", "synergy", "terminal")
"""What a state pays whatever is done in it; everything else is the price of doing things."""


def germinate_and_prune(story: Story, patience: int, drift: float) -> None:
    """One cycle of planting and pruning, while the host gains `drift` points per epoch."""
    story.score += drift
    story.germinate()
    for _ in range(patience):
        story.score += drift
        story.wait()
    story.score += drift
    story.prune()
    for _ in range(8):
        story.score += drift
        story.wait()


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("patience", [0, 4, 9])
def test_planting_and_pruning_never_pays(patience: int, drift: float) -> None:
    story = Story(SHAPED, horizon=100, slots=1)
    for cycle in range(2):
        germinate_and_prune(story, patience, drift)
        assert story.sum() < 0, f"after {cycle + 1} cycles"
        assert story.sum(gamma=SHAPED.gamma) < 0


@pytest.mark.parametrize("speed", [0, FADE])
@pytest.mark.parametrize("harm", [0.0, -0.3, -8.0])
def test_growing_harm_to_prune_it_never_pays(harm: float, speed: int) -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    # The harm shows late: most of it would be refunded, little of it was ever charged.
    story.contribution[:] = 0.1 * harm
    story.blend()
    story.contribution[:] = harm
    story.wait()
    story.prune(speed=speed)
    story.wait(10)
    assert int(story.signals.stage[0, 0]) not in LIVE_STAGES
    assert story.sum() < 0
    assert story.sum(gamma=SHAPED.gamma) < 0


@pytest.mark.parametrize("speed", [0, FADE])
def test_moving_alpha_back_and_forth_costs_more_than_waiting(speed: int) -> None:
    moving, waiting = Story(SHAPED, slots=1), Story(SHAPED, slots=1)
    for story in (moving, waiting):
        story.hold()
    start = len(moving.steps)
    for target in (0, 2, 0, 2):
        moving.set_alpha(target, speed=speed)
        moving.wait(8)
        waiting.wait(9)
    price = [name for name in moving.steps[0].terms if name not in STATE_TERMS]
    paid = sum(term(step, name) for step in moving.steps[start:] for name in price)
    assert paid < 0
    assert moving.sum("action", "shock") < waiting.sum("action", "shock")


def test_an_idle_op_on_the_best_seed_is_paid_like_waiting() -> None:
    """Otherwise a retarget to where alpha is would pick the seed that pays."""
    waiting, retargeting = Story(SHAPED), Story(SHAPED)
    for story in (waiting, retargeting):
        story.hold(0)
        story.germinate(1)
        story.contribution[:] = torch.tensor([[5.0, -3.0]])
        story.score = 60
        story.blend(1)
    wait = waiting.wait()
    set_alpha = retargeting.set_alpha(2, slot=0)
    assert bool(retargeting.signals.last_success)
    assert term(wait, "attribution") == term(set_alpha, "attribution")
    assert float(set_alpha.total) < float(wait.total)


def test_rent_grows_with_the_size_of_the_blueprint() -> None:
    sizes = torch.zeros(NUM_BLUEPRINTS, dtype=torch.int64)
    for index in selectable("cnn"):
        sizes[index] = count_parameters(blueprint_by_id(index), 16, "cnn")
    rents = {}
    for index in selectable("cnn"):
        story = Story(SHAPED, seed_params=sizes)
        story.hold(blueprint=index)
        rents[int(sizes[index])] = term(story.wait(), "rent")
    by_size = [rents[size] for size in sorted(rents)]
    assert len(rents) == 7
    assert by_size == sorted(by_size, reverse=True)
    assert by_size[0] < 0


def test_a_seed_that_only_trains_pays_no_rent() -> None:
    story = Story(SHAPED)
    story.germinate()
    assert term(story.advance(), "rent") == 0
    assert term(story.advance(), "rent") < 0


def test_a_slow_prune_shocks_less_than_a_fast_one() -> None:
    shocks = []
    for speed in range(4):
        story = Story(SHAPED, slots=1, seed_params=every_seed(5_000))
        story.hold()
        start = len(story.steps)
        story.prune(speed=speed)
        story.wait(10)
        shocks.append(sum(term(step, "shock") for step in story.steps[start:]))
        assert int(story.signals.stage[0, 0]) not in LIVE_STAGES
    assert shocks == sorted(shocks)
    assert shocks[0] < 4 * shocks[-1] < 0


@pytest.mark.parametrize(
    ("improvement", "contribution"),
    [(-0.1, 5.0), (-3.0, 5.0), (-3.0, -2.0), (2.0, -2.0), (0.0, -0.1), (-10.0, 0.0)],
)
def test_fossilizing_harm_never_pays(improvement: float, contribution: float) -> None:
    story = Story(SHAPED, slots=1)
    story.hold()
    story.score, story.contribution[:] = 50 + improvement, contribution
    story.wait(5)
    step = story.fossilize()
    assert bool(story.signals.last_success)
    assert term(step, "attribution") <= 0
    assert term(step, "action") < 0
    assert detail(step, "seeds_contributing") == 0
    last = story.finish()
    assert close(term(last, "terminal"), 0.05 * story.score), "no bonus for the fossil"


def test_fossilizing_what_helps_pays_and_counts_at_the_end() -> None:
    story = Story(SHAPED, slots=1)
    story.hold()
    story.score, story.contribution[:] = 55, 3.0
    story.wait(6)
    step = story.fossilize()
    assert close(term(step, "action"), -0.01 + 0.5 + 0.1 * 3)
    last = story.finish()
    assert close(term(last, "terminal"), 0.05 * 55 + 3 * torch.tanh(torch.tensor(1 / 3)).item())


def test_pruning_before_anything_was_measured_is_defined() -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    step = story.prune()
    assert bool(story.signals.last_success)
    assert close(term(step, "action"), -0.005 - 0.1)
    assert term(step, "attribution") == 0
    assert bool(step.total.isfinite().all())


def test_pruning_a_harmful_seed_pays_for_the_deed() -> None:
    story = Story(SHAPED, slots=1)
    story.germinate()
    story.contribution[:] = -2.0
    story.blend()
    step = story.prune()
    assert close(term(step, "action"), -0.005 + 0.15)
    assert close(term(step, "attribution"), 2.0), "what was charged before is given back"


def test_pending_credit_is_paid_in_the_next_step() -> None:
    story = scaffolded(SHAPED)
    step = story.fossilize(1)
    credit = detail(step, "hindsight_credit")
    assert credit > 0
    assert term(step, "hindsight") == 0
    assert close(term(story.wait(), "hindsight"), credit)
    assert term(story.wait(), "hindsight") == 0


def test_credit_earned_in_the_last_step_is_paid_there() -> None:
    length = len(scaffolded(SHAPED).steps)
    story = scaffolded(SHAPED, horizon=length + 2)
    step = story.fossilize(1)
    assert not story.active
    assert term(step, "hindsight") > 0
    assert close(term(step, "hindsight"), detail(step, "hindsight_credit"))


def test_credit_that_is_pending_at_a_rollback_is_still_paid() -> None:
    story = scaffolded(SHAPED)
    credit = detail(story.fossilize(1), "hindsight_credit")
    step = story.do(LifecycleOp.WAIT, rolled_back=True)
    assert close(term(step, "hindsight"), credit)


def test_a_rollback_replaces_what_the_step_would_have_paid() -> None:
    story = Story(SHAPED)
    story.hold(0)
    story.germinate(1)
    step = story.do(LifecycleOp.WAIT, rolled_back=True)
    settled = {"pbrs", "clawback", "auto_prune", "rollback"}
    assert term(step, "rollback") == -10
    assert close(term(step, "auto_prune"), -0.4)
    assert term(step, "clawback") < 0
    assert all(term(step, name) == 0 for name in step.terms if name not in settled)
    assert close(story.sum("pbrs", gamma=SHAPED.gamma), 0.0)


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("disable_pbrs", "pbrs"),
        ("disable_terminal_reward", "terminal"),
        ("disable_anti_gaming", "shock"),
    ],
)
def test_ablations_remove_their_terms(switch: str, name: str) -> None:
    whole, rest = Story(SHAPED).wait(), Story(SHAPED.replace(**{switch: True})).wait()
    assert whole.terms.keys() - rest.terms.keys() == {name}
