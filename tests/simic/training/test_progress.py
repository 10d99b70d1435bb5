from __future__ import annotations

from esper.simic.training.progress import Progress
from tests.simic.training.test_trainer import make_trainer


def step(phase: str, number: int, round_number: int = 2) -> Progress:
    return Progress(
        phase=phase,  # type: ignore[arg-type]
        round=round_number,
        rounds=4,
        step=number,
        steps=10,
        env_steps=0,
        active=1,
        seconds=0.1,
    )


def test_the_share_done_counts_steps_within_the_round() -> None:
    assert step("rollout", 5).done_share == 2.5 / 4
    assert step("twins", 5).done_share == 2 / 4


def test_a_report_speaks_for_its_round() -> None:
    (report,) = make_trainer(rounds=1).run()
    assert report.seconds == sum(report.timings.values())
    assert set(report.timings) == {
        *("twins", "population", "policy", "reward", "update", "evaluation")
    }
    assert report.approx_kl is not None
    assert report.score_mean == report.outcome.score_mean
    assert len(report.conditional_entropies) == 8
