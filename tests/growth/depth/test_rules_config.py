from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from esper.growth.config import GrowthConfig
from esper.growth.depth.rules import DeepenConfig
from esper.leyline.errors import ConfigError, UsageError
from esper.utils.settings import change_settings, parse_document


def test_what_deepen_stands_for() -> None:
    assert DeepenConfig.of(None) is None
    assert DeepenConfig.of(False) is None
    assert DeepenConfig.of(True) == DeepenConfig()
    assert DeepenConfig.of({"start": 3}) == DeepenConfig(start=3)
    assert DeepenConfig.of(DeepenConfig(start=3)) == DeepenConfig(start=3)
    with pytest.raises(UsageError, match=r"a mapping such as \{'start': 3\}"):
        DeepenConfig.of("yes")  # type: ignore[arg-type]


def test_moments_are_steps_or_shares() -> None:
    config = DeepenConfig(at={0.2: 6, 40: {"encoder": 3, "decoder": 4}})
    assert config.steps(1_000) == {200: 6, 40: {"encoder": 3, "decoder": 4}}
    assert DeepenConfig(at={0.0001: 2}).steps(100) == {1: 2}
    assert DeepenConfig().steps(100) is None


@pytest.mark.parametrize("at", [{0: 2}, {1.0: 2}, {-0.5: 2}, {0.2: "two"}, [3], 7, {True: 2}])
def test_other_moments_are_refused(at: Any) -> None:
    with pytest.raises(ConfigError, match=r"DeepenConfig\.at"):
        DeepenConfig(at=at)


def test_settings_survive_a_file_and_are_set_by_key() -> None:
    deepen = DeepenConfig(
        start={"h": 3}, at={0.2: 6, 40: {"h": 12}}, controller="slope", stacks="h", order="stack"
    )
    growth = GrowthConfig(deepen=deepen)
    text = yaml.safe_dump(growth.to_mapping())
    assert GrowthConfig.from_mapping(parse_document(text)) == growth
    changed = change_settings(growth, {"deepen.at": {0.5: 4}, "deepen.start": 2})
    assert changed.deepen == deepen.replace(start=2, at={0.5: 4})
    assert GrowthConfig.from_mapping({}).deepen is None


def test_a_function_and_a_state_dict_are_told_in_words() -> None:
    def my_rule(progress: Any) -> int | None:
        return None

    state = {"w": torch.zeros(3)}
    told = DeepenConfig(controller=my_rule, weights=state).to_mapping()
    assert told["controller"].endswith("my_rule")
    assert told["weights"] == "a state_dict of 1 entries"
    assert DeepenConfig(weights=Path("a") / "b.pt").to_mapping()["weights"] == "a/b.pt"
    with pytest.raises(ConfigError, match=r"DeepenConfig\.controller must be"):
        DeepenConfig(controller=3)  # type: ignore[arg-type]
