from __future__ import annotations

import pytest
import torch

from esper.lab.bench.learning import PlainWork, PolicyWork, compare_policies
from esper.lab.imagined import random_lives


@pytest.fixture
def work() -> PolicyWork:
    torch.manual_seed(0)
    return PolicyWork(random_lives(rows=3, epochs=5), hidden=16)


def gradients(work: PolicyWork) -> list[torch.Tensor]:
    return [weight.grad for weight in work.policy.parameters() if weight.grad is not None]


def test_an_update_reaches_every_weight_and_scores_what_was_done(work: PolicyWork) -> None:
    work.update()
    assert len(gradients(work)) == len(list(work.policy.parameters()))
    scores = work.policy.score(work.states, work.blueprints, work.actions, work.masks)
    torch.testing.assert_close(scores.log_probs, work.log_probs, rtol=0, atol=1e-5)


def test_plain_steps_do_the_same_work(work: PolicyWork) -> None:
    work.update()
    fused = [grad.clone() for grad in gradients(work)]
    PlainWork(work).update()
    torch.testing.assert_close(gradients(work), fused, rtol=1e-4, atol=1e-6)


def test_step_and_update_are_compared(work: PolicyWork) -> None:
    found = compare_policies(work, PlainWork(work), rounds=1)
    assert [each.work for each in found] == ["step", "update"]
    assert all(each.reference == "plain steps" and each.ratio > 0 for each in found)
    assert set(found[0].to_mapping()) >= {"esper_ms", "reference_ms", "ratio", "cpu_ratio"}
