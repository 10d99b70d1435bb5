import pytest

from esper.leyline import controller as defaults
from esper.leyline.actions import HEAD_NAMES

# Columns: entropy multiplier, entropy floor, floor penalty, probability floor.
PER_HEAD = {
    "op": (1.0, 0.15, 0.05, 0.02),
    "slot": (1.0, 0.20, 0.15, 0.03),
    "blueprint": (1.3, 0.40, 0.50, 0.10),
    "style": (1.2, 0.30, 0.20, 0.05),
    "tempo": (1.3, 0.40, 0.50, 0.10),
    "alpha_target": (1.2, 0.25, 0.15, 0.05),
    "alpha_speed": (1.2, 0.20, 0.12, 0.05),
    "alpha_curve": (1.2, 0.20, 0.12, 0.05),
}


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_constants_of_every_head(head: str) -> None:
    assert PER_HEAD[head] == (
        defaults.ENTROPY_COEF_PER_HEAD[head],
        defaults.ENTROPY_FLOOR_PER_HEAD[head],
        defaults.ENTROPY_FLOOR_PENALTY_COEF[head],
        defaults.PROBABILITY_FLOOR_PER_HEAD[head],
    )


def test_tables_have_exactly_the_heads() -> None:
    for table in (
        defaults.ENTROPY_COEF_PER_HEAD,
        defaults.ENTROPY_FLOOR_PER_HEAD,
        defaults.ENTROPY_FLOOR_PENALTY_COEF,
        defaults.PROBABILITY_FLOOR_PER_HEAD,
    ):
        assert tuple(table) == HEAD_NAMES


def test_scalars() -> None:
    assert defaults.DEFAULT_EPISODE_LENGTH == 150
    assert defaults.DEFAULT_LSTM_HIDDEN_DIM == 512
    assert defaults.DEFAULT_FEATURE_DIM == defaults.DEFAULT_LSTM_HIDDEN_DIM
    assert defaults.DEFAULT_GAMMA == 0.995
