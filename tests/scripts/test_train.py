from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from esper.nissa.reader import open_run
from esper.scripts import train
from esper.scripts.train import build_parser, heuristic_commands, main, ppo_command


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)


def test_the_documents_own_command_trains(tmp_path: Path) -> None:
    code = main(
        [
            *("ppo", "--episodes", "2", "--max-epochs", "3", "--n-envs", "2", "--seed", "42"),
            *("--device", "cpu", "--task", "digits_mlp"),
        ]
    )
    assert code == 0
    config = yaml.safe_load((tmp_path / "runs" / "digits" / "config.yaml").read_text())
    assert (config["rounds"], config["episode_length"], config["rows"]) == (2, 3, 2)
    assert (config["seed"], config["policy"]["lstm_hidden_dim"]) == (42, 512)
    assert (tmp_path / "runs" / "digits" / "report.html").is_file()


def test_the_command_of_the_documents_is_translated() -> None:
    given = ["ppo", "--episodes", "5", "--max-epochs", "10", "--seed", "42"]
    command = ppo_command(build_parser().parse_args(given))
    assert command == [
        *("train", "digits", "--task", "digits", "--rounds", "5", "--envs", "4"),
        *("--episode-length", "10", "--seed", "42", "--set", "policy.lstm_hidden_dim=512"),
        *("--device", "auto"),
    ]
    first = ppo_command(build_parser().parse_args([*given, "--policy-version", "v1"]))
    assert "policy.lstm_hidden_dim=128" in first
    assert "policy.blueprint_layers=2" in first
    assert "policy.critic=state" in first


def test_a_run_is_continued_with_what_was_given_and_nothing_else() -> None:
    given = ["ppo", "--resume", "--set", "ppo.entropy_coef=0.1", "--episodes", "9", "--out", "r"]
    command = ppo_command(build_parser().parse_args(given))
    assert command == [
        *("train", "--resume", "--set", "rounds=9", "--set", "ppo.entropy_coef=0.1", "--out", "r")
    ]


def test_the_documents_command_goes_on_with_a_setting_changed(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    tiny = ["--max-epochs", "2", "--n-envs", "2", "--task", "digits_mlp", "--device", "cpu"]
    first = ["--episodes", "1", "--set", "ppo.clip=0.3", "--set", "evaluate_every=0"]
    assert main(["ppo", *tiny, *first, "--out", out]) == 0
    change = ["--set", "ppo.entropy_coef=0.1", "--episodes", "2"]
    assert main(["ppo", "--resume", *change, "--out", out]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["rounds"], config["rows"], config["seed"]) == (2, 2, 42)
    assert (config["ppo"]["clip"], config["ppo"]["entropy_coef"]) == (0.3, 0.1)
    with open_run(tmp_path / "run") as stored:
        assert [row["round"] for row in stored.rows("rounds")] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ppo", "--obs-version", "v2"], "there is no observation 'v2'; only v3 exists"),
        (["ppo", "--policy-version", "v3"], "choose from v1, v2"),
        (["heuristic", "--episodes", "0"], "a whole number from 1"),
        (["ppoo"], "did you mean 'ppo'"),
        (["ppo", "--resume"], "--resume needs the run to continue: --out RUN"),
    ],
)
def test_wrong_requests_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err


def test_the_heuristic_grows_networks_with_seeds_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["heuristic", "--episodes", "2", "--max-epochs", "7", "--seed", "3", "--out", "h"]
    commands = heuristic_commands(build_parser().parse_args(given))
    assert [command[-1] for command in commands] == ["h/0", "h/1"]
    assert [command[command.index("--seed") + 1] for command in commands] == ["3", "4"]
    carried_out: list[list[str]] = []
    codes = iter([0, 1])

    def carry_out(command: list[str]) -> int:
        carried_out.append(command)
        return next(codes)

    monkeypatch.setattr(train, "esper", carry_out)
    assert main(given) == 1
    assert carried_out == commands


@pytest.mark.filterwarnings("ignore:.*too few to grow in")
def test_the_patience_of_the_heuristic_reaches_it(tmp_path: Path) -> None:
    given = [
        *("heuristic", "--max-epochs", "2", "--plateau-epochs", "7", "--task", "digits_mlp"),
        *("--device", "cpu"),
    ]
    assert main(given) == 0
    config = yaml.safe_load((tmp_path / "runs" / "digits_mlp" / "config.yaml").read_text())
    assert config["controller"] == "heuristic:plateau_epochs=7"
