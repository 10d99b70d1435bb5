"""The model of digits trains the recipe's learner, with the settings that are asked for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.digits_model import DigitsModel, main
from esper.leyline.actions import LifecycleOp, placeholder_actions

QUICK = ["--rows", "4", "--rounds", "1"]


def _row(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
    """Return the only row of the table, by column."""
    assert main([*QUICK, *more]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    header, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return dict(zip(header, row, strict=True))


@pytest.mark.slow
def test_settings_reach_the_reward_and_the_learner(capsys: pytest.CaptureFixture[str]) -> None:
    plain = _row(capsys)
    assert plain["round"] == "1"
    for column in ("ops", "greedy ops"):
        counts = [float(count) for count in plain[column].split()]
        assert len(counts) == len(LifecycleOp)
        # Rounded counts add up to the decisions of an episode.
        assert sum(counts) == pytest.approx(60, abs=0.3)
    # The first round is played before anything is learned: only what seeds cost differs.
    changed = _row(
        capsys, "--set", "reward.twin.open_seed_cost=2", "--set", "ppo.learning_rate=0.000001"
    )
    assert changed["ops"] == plain["ops"]
    assert float(changed["return"]) < float(plain["return"])
    assert float(changed["KL"]) < float(plain["KL"])


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("ppo.clop=0.2", "did you mean 'clip'"),
        ("ppo.clip", "KEY=VALUE"),
        ("rows=8", "--rows"),
    ],
)
def test_a_setting_that_is_not_there_is_refused(
    setting: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*QUICK, "--set", setting])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_a_row_is_its_twin_until_a_seed_takes_part() -> None:
    model = DigitsModel(2, seed=0)
    signals = model.reset()
    curves = model.twin_curves()
    has_parted = False
    for step in range(model.steps):
        actions = placeholder_actions(2)
        if step >= 3:
            actions["op"][1] = int(LifecycleOp.GERMINATE if step == 3 else LifecycleOp.ADVANCE)
            actions["blueprint"][1] = model.blueprints[0]
        signals = model.step(actions)
        twin = curves[:, step + 1].double()
        torch.testing.assert_close(signals.twin_score.double(), twin, rtol=0, atol=1e-4)
        is_twin = (signals.val_score.double() - twin).abs() < 1e-4
        has_parted |= bool(signals.has_effective_seed[1])
        assert is_twin.tolist() == [True, not has_parted]
    assert has_parted
    assert signals.params[1] == signals.host_params[1] + 592
