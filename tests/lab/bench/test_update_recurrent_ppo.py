from __future__ import annotations

import sys

import pytest

from esper.lab.bench.learning import PlainWork, PolicyWork, compare_policies
from esper.lab.bench.update import RecurrentPPOWork, find_reference
from esper.lab.imagined import random_lives
from esper.leyline.errors import UsageError


def test_without_it_the_policy_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    work = PolicyWork(random_lives(rows=2, epochs=2), hidden=16)
    reference, left_out = find_reference(work)
    assert isinstance(reference, PlainWork)
    assert "gymnasium is not installed (pip install" in left_out


def test_one_step_is_too_little() -> None:
    with pytest.raises(UsageError, match="at least 2 steps"):
        RecurrentPPOWork(1, 1, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_has_as_many_parameters_and_learns() -> None:
    pytest.importorskip("sb3_contrib")
    work = PolicyWork(random_lives(rows=2, epochs=3), hidden=512)
    reference, left_out = find_reference(work)
    assert isinstance(reference, RecurrentPPOWork)
    assert left_out == ""
    assert 0.9 < reference.parameters / work.parameters < 1.1
    found = compare_policies(work, reference, rounds=1)
    assert [each.work for each in found] == ["step", "plain_step", "update"]
