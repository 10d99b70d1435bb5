from __future__ import annotations

import torch

from benchmarks.problems.graded import GradedProblem
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.recorder_rows import detail_columns
from tests.simic.training.test_vectorized_trainer import make_trainer

NAMES = tuple(f"b{index}" for index in range(NUM_BLUEPRINTS))


def play() -> RoundOutcome:
    return next(make_trainer(rounds=1, recorded_rows=2).run()).outcome


def test_columns_are_lists_of_one_length() -> None:
    outcome = play()
    for table, columns in detail_columns(outcome, NAMES).items():
        lengths = {len(values) for values in columns.values() if isinstance(values, list)}
        assert len(lengths) == 1, table


def test_without_recorded_rows_there_is_nothing_to_tell() -> None:
    outcome = next(make_trainer(rounds=1, recorded_rows=0).run()).outcome
    assert detail_columns(outcome, NAMES) == {}


def test_recorded_rows_are_spread_over_all() -> None:
    assert list(play().recorded_rows) == [0, 4]


def test_probabilities_of_the_choice_and_its_rivals_are_no_more_than_one() -> None:
    columns = detail_columns(play(), NAMES)["decisions"]
    for own, others in zip(columns["confidence_op"], columns["alternatives"], strict=True):
        assert own + sum(chance for _, chance in others["op"]) <= 1.0 + 1e-3


def test_the_problem_pays_by_its_own_terms() -> None:
    problem = GradedProblem(2)
    problem.reset()
    columns = detail_columns(play(), NAMES)["decisions"]
    assert torch.tensor(columns["reward"]).isfinite().all()
