from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from esper.nissa.schema import AlarmRow
from esper.scripts.cli.views import TrainView, duration, phase_line, print_trained
from esper.simic.training.progress import entropies_line, round_line

ENTROPIES = {"slot": 0.9, "blueprint": 0.8, "style": None, "tempo": 0.7, "op": 0.42}


def report(number: int, **changes: Any) -> Any:
    plain: dict[str, Any] = {
        "round": number,
        "return_mean": -0.5 + 0.1 * number,
        "gain_mean": 0.25 * number,
        "fossilization_rate": 0.41,
        "explained_variance": 0.615,
        "potential_share": 0.41,
        "approx_kl": 0.0081,
        "wait_share_free": 0.94,
        "conditional_entropies": ENTROPIES,
        "evaluation": None,
        "timings": {"evaluation": 0.0},
    }
    return SimpleNamespace(**{**plain, **changes})


def progress(number: int, rounds: int = 5, finished: Any = None, **changes: Any) -> Any:
    plain: dict[str, Any] = {
        "phase": "rollout",
        "round": number,
        "rounds": rounds,
        "step": 12,
        "steps": 60,
        "seconds": 0.5,
        "active": 64,
        "score_mean": 93.125,
        "gain_mean": 0.5,
        "op_counts": {"WAIT": 60, "GERMINATE": 3, "PRUNE": 0},
        "report": finished,
        "done_share": (number + (0.2 if finished is None else 1.0)) / rounds,
    }
    return SimpleNamespace(**{**plain, **changes})


def show(*, terminal: bool, verbose: bool = False, title: str = "training digits") -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    with TrainView(console, 5, title=title, verbose=verbose) as view:
        for number in range(5):
            view.show(progress(number))
            view.show(progress(number, finished=report(number)))
            view.alarm(AlarmRow(round=number, monitor="m", severity="warning", message="it sank"))
            view.alarm(AlarmRow(round=number, monitor="n", severity="info", message="so what"))
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("every", "told"), [(0, []), (2, [1, 3, 4]), (9, [4])])
def test_greedy_episodes_are_announced(terminal: bool, every: int, told: list[int]) -> None:
    """They take as long as a round, and nothing is heard of them until they are over."""
    for number in range(5):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
        with TrainView(console, 5, title="x", evaluate_every=every) as view:
            view.show(progress(number, step=59))
            assert "greedy episodes" not in stream.getvalue()
            view.show(progress(number, step=60))
        assert ("then greedy episodes to choose" in stream.getvalue()) == (number in told)


def test_a_terminal_shows_what_matters() -> None:
    text = show(terminal=True)
    for word in (
        "training digits",
        "5/5 rounds",
        "ETA",
        "episodes 12/60",
        "64 rows",
        "germinate 3",
    ):
        assert word in text
    for word in ("validation gain", "+1.000 points", "explained variance", "0.61", "KL", "94 %"):
        assert word in text
    assert "op 0.42 slot 0.9 blueprint 0.8 tempo 0.7 style –" in text
    assert "▁▂▄▆█" in text
    assert "share of the potential" in text
    assert "round 1: alarm (warning): it sank" in text


def test_without_a_terminal_there_are_plain_lines() -> None:
    lines = show(terminal=False).splitlines()
    assert lines[0].startswith(
        "round 1/5  return -0.500  val gain +0.000  fossilized 41 %  EV 0.61 (potential 0.41)"
    )
    assert lines[0].endswith(" s")
    assert lines[-1].startswith("round 5/5  return -0.100")
    assert "ETA 0 s" in lines[-1]
    # An alarm that stays is told once, and what is only informative not at all.
    assert sum("it sank" in line for line in lines) == 1
    assert not any("so what" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_every_round_is_shown_when_asked_for() -> None:
    lines = show(terminal=False, verbose=True).splitlines()
    assert sum(line.startswith("round ") and "return" in line for line in lines) == 5
    assert sum("so what" in line for line in lines) == 1


@pytest.mark.parametrize("title", ["[/x] [red]", "{task.speed}", "a\x1b[31mb\nc"])
def test_a_title_is_shown_as_text(title: str) -> None:
    text = show(terminal=True, title=title)
    assert title.replace("\x1b", "\\x1b").replace("\n", "\\x0a") in text
    assert "\x1b[31m" not in text


def test_what_was_not_measured_is_a_dash() -> None:
    unknown = report(
        0,
        gain_mean=None,
        fossilization_rate=None,
        explained_variance=None,
        potential_share=None,
        approx_kl=float("nan"),
        wait_share_free=None,
        conditional_entropies={},
    )
    assert round_line(unknown) == ("return -0.500  fossilized –  EV –  KL –  WAIT –  entropies –")
    assert entropies_line({"alpha_curve": 0.5}) == "alpha_curve 0.5"
    twins = progress(0, phase="twins", active=0, score_mean=None, gain_mean=None, op_counts={})
    assert phase_line(twins) == "waiting twins 12/60"


def test_a_greedy_evaluation_is_told_and_stays() -> None:
    evaluated = report(2, evaluation=SimpleNamespace(val_gain_mean=0.75))
    assert "val gain +0.500  greedy val gain +0.750  fossilized" in round_line(evaluated)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with TrainView(console, 5, title="x") as view:
        view.show(progress(2, finished=evaluated))
        view.show(progress(3, finished=report(3)))
    # What is drawn last is round 4, which had none.
    assert "4/5 rounds" in stream.getvalue()
    assert "+0.750 points  after round 3" in stream.getvalue()


def test_small_numbers_keep_their_size() -> None:
    assert "KL 2.0e-05" in round_line(report(0, approx_kl=2e-5))


def test_times_as_people_say_them() -> None:
    assert [duration(s) for s in (0.4, 59.6, 61, 3_725, -3)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h 2 min",
        "0 s",
    ]


def test_a_resumed_run_counts_the_time_from_where_it_began() -> None:
    stream = io.StringIO()
    with TrainView(Console(file=stream, width=300), 5, 4, title="x") as view:
        view.show(progress(4, finished=report(4)))
    assert "round 5/5" in stream.getvalue()
    assert "ETA 0 s" in stream.getvalue()


def test_the_first_round_says_when_the_run_will_end_by_its_usual_step() -> None:
    with TrainView(Console(file=io.StringIO(), width=300), 5, title="x") as view:
        for seconds in (40.0, 0.5, 0.5, 0.5):
            view.show(progress(0, seconds=seconds))
        assert view._eta(time.monotonic(), 0.2, 0) == "unknown"
        # Waiting twins and the first step, in which everything is compiled, do not count.
        view.show(progress(0, phase="twins", seconds=70.0))
        view.show(progress(0))
        assert view._eta(time.monotonic(), 0.2, 0) == duration(0.5 * 60 * 4.8)
        # Later it is what whole rounds took.
        assert view._eta(view._started + 50.0, 2.5, 2) == duration(50.0)


def test_greedy_episodes_are_part_of_the_time_that_is_left() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with TrainView(console, 10, title="x", evaluate_every=4) as view:
        for _ in range(5):
            view.show(progress(0, rounds=10))
        # After rounds 4, 8 and 10; before one was seen, each counts as a round.
        assert view._eta(time.monotonic(), 0.2, 0) == duration(0.5 * 60 * (9.8 + 3))
        greedy = report(3, evaluation=SimpleNamespace(val_gain_mean=0.0))
        greedy.timings["evaluation"] = 7.0
        view.show(progress(3, rounds=10, finished=greedy))
        # 47 seconds for 4 rounds of 10 and an evaluation of 7; 6 rounds and 2 evaluations are left.
        assert view._eta(view._started + 47.0, 4.0, 4) == duration(60.0 + 14.0)
        # The last round is over and its greedy episodes are not.
        assert view._eta(view._started + 47.0, 10.0, 9) == duration(7.0)
    assert "ETA" in stream.getvalue()


@pytest.mark.parametrize(
    ("paid", "gain", "is_told"), [(0.97, 0.0, True), (3.65, -1.11, True), (0.9, 0.1, False)]
)
def test_a_summary_does_not_call_a_return_without_gain_a_success(
    paid: float, gain: float, is_told: bool
) -> None:
    console = Console(file=io.StringIO(), width=100)
    last = {"rounds": 1, "return_mean": paid, "gain_mean": gain}
    document: dict[str, Any] = {"task": "digits", "rounds": 5, "env_steps": 200, "seconds": 9.0}
    document |= {"first": {}, "last": last, "evaluation": None, "policy": "p", "report": "r"}
    print_trained(console, document)
    assert isinstance(console.file, io.StringIO)
    assert ("judge by the gain" in console.file.getvalue()) is is_told
