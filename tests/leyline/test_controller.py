from typing import Any

import torch
from torch import Tensor

from esper.leyline import controller as defaults
from esper.leyline.actions import HEAD_NAMES, placeholder_actions
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS


class Sleeper:
    """The smallest thing that is a controller."""

    def reset(self, rows: int, device: torch.device | str) -> None:
        self.rows = rows

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        return placeholder_actions(masks.rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_class_with_the_four_methods_is_a_controller() -> None:
    assert isinstance(Sleeper(), Controller)


def test_a_class_without_one_of_them_is_not() -> None:
    for method in ("reset", "act", "state_dict", "load_state_dict"):
        methods = {name: item for name, item in vars(Sleeper).items() if name != method}
        assert not isinstance(type("Partial", (), methods)(), Controller)


def test_context_knows_the_built_in_blueprints_unless_told_otherwise() -> None:
    context = ControllerContext(slot_names=("layer1",))
    assert context.blueprint_names == BUILTIN_BLUEPRINTS
    assert context.seed == 0


def test_constants_that_the_documents_fix() -> None:
    for table in (
        defaults.ENTROPY_COEF_PER_HEAD,
        defaults.ENTROPY_FLOOR_PER_HEAD,
        defaults.ENTROPY_FLOOR_PENALTY_COEF,
        defaults.PROBABILITY_FLOOR_PER_HEAD,
    ):
        assert tuple(table) == HEAD_NAMES
    assert defaults.DEFAULT_EPISODE_LENGTH == 150
    assert defaults.DEFAULT_FEATURE_DIM == defaults.DEFAULT_LSTM_HIDDEN_DIM == 512
    assert defaults.DEFAULT_GAMMA == 0.995
