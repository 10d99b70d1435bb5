"""Learners of others learn on the environments for a few hundred steps."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from sb3_contrib import MaskablePPO

from benchmarks import maskable_ppo
from esper.lab.envs import GrowVectorEnv
from esper.lab.envs.stable_baselines import GrowVecEnv
from esper.leyline.errors import UsageError
from esper.scripts.cli.main import main

pytestmark = pytest.mark.integrations

EXAMPLES = Path(__file__).parents[2] / "examples" / "envs"
SIZE = ("--recipe", "smoke", "--rows", "8", "--length", "8", "--rounds", "4")


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_maskable_ppo_learns_on_a_population(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("maskable_ppo.py", monkeypatch, *SIZE)
    told = capsys.readouterr().out
    assert told.count("ep_rew_mean") == 4
    assert "total_timesteps      | 256" in told


def test_the_curves_of_both_learners_have_the_same_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, run, picture = tmp_path / "ppo.json", tmp_path / "run", tmp_path / "curves.svg"
    size = ["--rows", "3", "--length", "4", "--rounds", "2", "--device", "cpu"]
    assert maskable_ppo.main(["smoke", *size, "--out", str(written)]) == 0
    asked = ["train", "smoke", "--envs", "3", "--episode-length", "4", "--rounds", "2"]
    assert main([*asked, "--device", "cpu", "--json", "--out", str(run)]) == 0
    theirs, ours = maskable_ppo.read_curve(written), maskable_ppo.read_curve(run)
    assert [each["env_steps"] for each in theirs] == [12, 24]
    assert [each["env_steps"] for each in ours] == [12, 24]
    assert all(each.keys() == ours[0].keys() for each in theirs)
    assert all(np.isfinite(list(each.values())).all() for each in theirs)
    capsys.readouterr()
    files = ["--summary", str(written), str(run), "--picture", str(picture)]
    assert maskable_ppo.main(files) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["ppo", "run"]
    assert "return over seconds" in picture.read_text(encoding="utf-8")


def test_training_ends_when_its_time_is_over(tmp_path: Path) -> None:
    written = tmp_path / "ppo.json"
    size = ["--rows", "1", "--length", "2", "--seconds", "0", "--device", "cpu"]
    assert maskable_ppo.main(["smoke", *size, "--out", str(written)]) == 0
    assert len(maskable_ppo.read_curve(written)) == 1


def test_ppo_in_one_file_learns_on_a_population(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("ppo_in_one_file.py", monkeypatch, *SIZE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"round {n}" for n in range(1, 5)]


def test_factored_masks_serve_maskable_ppo_too() -> None:
    settings = {"episode_length": 3, "strategy": "sequential"}
    env = GrowVecEnv(GrowVectorEnv(2, "smoke", settings))
    model = MaskablePPO("MlpPolicy", env, n_steps=3, batch_size=6, n_epochs=1, device="cpu")
    model.learn(6)
    assert model.num_timesteps == 6
    masks = env.env_method("action_masks")
    assert len(masks) == 2
    with pytest.raises(UsageError, match="'reset_all'"):
        env.env_method("reset_all")
    env.close()
