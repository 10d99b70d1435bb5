import dataclasses
import math

import pytest
import torch

from esper.leyline.errors import NonFiniteError, UsageError
from esper.tamiyo.policy.checks import (
    check_finite,
    check_signals,
    find_stranger,
    is_debugging,
    must_not_wait,
    refuse_strangers,
    refuse_unknown_stages,
)
from esper.testing.imagined import middle_aged_hosts


def test_debugging_is_a_matter_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    assert not is_debugging()
    assert must_not_wait(torch.device("cuda", 0))
    assert not must_not_wait(torch.device("cpu"))
    monkeypatch.setenv("ESPER_DEBUG", "1")
    assert is_debugging()
    assert not must_not_wait(torch.device("cuda", 0))
    monkeypatch.setenv("ESPER_DEBUG", "0")
    assert not is_debugging()


def test_signals_of_a_real_lifecycle_pass() -> None:
    signals = middle_aged_hosts(32).signals()
    check_signals(signals)
    refuse_unknown_stages(signals)
    refuse_strangers(signals, expected=3, found=3)


def test_a_wrong_count_leads_to_its_cause() -> None:
    signals = middle_aged_hosts(8).signals()
    row, slot = signals.occupied.nonzero()[2].tolist()
    stage = signals.stage.clone()
    stage[row, slot] = 5
    strange = dataclasses.replace(signals, stage=stage)
    message = f"row {row}, slot {slot}: no stage has the value 5"
    with pytest.raises(UsageError, match=message):
        refuse_strangers(strange, expected=3, found=torch.tensor(2))
    with pytest.raises(UsageError, match=message):
        refuse_unknown_stages(strange)
    assert "does not exist" in str(find_stranger(signals))


def test_codes_and_measurements_must_make_sense() -> None:
    signals = middle_aged_hosts(8).signals()
    row, slot = signals.occupied.nonzero()[0].tolist()
    algorithm = signals.algorithm.clone()
    algorithm[row, slot] = 7
    with pytest.raises(UsageError, match=f"row {row}, slot {slot}: algorithm must be 0 to 2"):
        check_signals(dataclasses.replace(signals, algorithm=algorithm))
    measured = torch.isfinite(signals.contribution).nonzero()[0].tolist()
    age = signals.counterfactual_age.clone()
    age[measured[0], measured[1]] = -1
    with pytest.raises(UsageError, match="a seed has both or neither"):
        check_signals(dataclasses.replace(signals, counterfactual_age=age))


def test_a_lost_feature_is_named() -> None:
    check_finite(torch.zeros(2, 3), ["a", "b", "c"])
    features = torch.tensor([[0.0, 1.0], [0.0, math.inf]])
    with pytest.raises(NonFiniteError, match=r"row 1: feature 1 \(b\) is inf"):
        check_finite(features, ["a", "b"])
