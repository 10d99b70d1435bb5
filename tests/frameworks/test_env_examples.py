"""Learners of others learn on the environments for a few hundred steps."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from sb3_contrib import MaskablePPO

from esper.envs import GrowVectorEnv
from esper.envs.stable_baselines import GrowVecEnv
from esper.leyline.errors import UsageError

pytestmark = pytest.mark.integrations

EXAMPLES = Path(__file__).parents[2] / "examples" / "envs"
SIZE = ("--recipe", "smoke", "--rows", "8", "--length", "8", "--rounds", "4")


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_maskable_ppo_learns_on_a_population(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_example("maskable_ppo.py", monkeypatch, *SIZE, "--out", str(tmp_path / "curve.json"))
    curve = json.loads((tmp_path / "curve.json").read_text(encoding="utf-8"))
    assert [each["steps"] for each in curve] == [64.0, 128.0, 192.0, 256.0]
    assert all(np.isfinite(each["return"]) and np.isfinite(each["gain"]) for each in curve)


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
