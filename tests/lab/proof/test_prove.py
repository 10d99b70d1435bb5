from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from esper.lab.proof.arm import parse_arm, waiting
from esper.lab.proof.play import Player
from esper.lab.proof.prove import REPORTED_ONLY, Proof, ProveConfig, make_arm
from esper.lab.proof.results import ResultFile, write_report
from esper.lab.tasks.member import GivenMember
from esper.leyline.errors import UsageError
from tests.lab.population.tiny_tasks import TinyText
from tests.lab.proof.made_up import result
from tests.lab.proof.small import QUICK, member, play_config

MEMBERS = (member(2), member(2, 600))
MANY = (*MEMBERS, *(member(2, 100 * number) for number in range(1, 6)))
"""Enough of them that three comparisons can come to a verdict."""
GOOD = [
    {"epoch": 0, "op": "grow", "slot": slot, "blueprint": "conv_heavy", "tempo": 3}
    for slot in ("100%", "0%")
]


def proof(
    folder: Path,
    arms: list[str],
    stop_after: int | None = None,
    members: Sequence[GivenMember] = MEMBERS,
    **changes: object,
) -> Proof:
    folder.mkdir(exist_ok=True)
    config = ProveConfig(arms=tuple(arms), **{"seeds": 3, "play": play_config(), **changes})
    epochs = 0

    def is_stopped() -> bool:
        nonlocal epochs
        epochs += 1
        return stop_after is not None and epochs > stop_after

    return Proof(config, members, folder, Player(config.play, is_stopped=is_stopped))


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD))
    return str(path)


def played(
    folder: Path,
    errors: dict[str, float],
    *,
    purpose: str = "proof",
    spread: float = 0.02,
    members: Sequence[GivenMember] = MEMBERS,
) -> None:
    """Write results down that were never played: mean log errors by arm, the same noise for all.

    They are what counts for the purpose: test errors of a proof, validation errors of rates. The
    other split says the opposite, so that nobody reads it unnoticed.
    """
    stream = np.random.default_rng(0)
    noise = stream.normal(0, spread, (len(members), 6))
    folder.mkdir(exist_ok=True)
    made = []
    for place, own in enumerate(members):
        for arm, error in errors.items():
            counts = np.exp(np.log(error) + noise[place] + stream.normal(0, spread / 4, 6))
            test, val = (counts, 0.04 / counts)[:: 1 if purpose == "proof" else -1]
            parameters = 100 if arm == "wait" else 150
            made.append(
                result(
                    arm,
                    own.label,
                    test.tolist(),
                    purpose=purpose,
                    parameters=parameters,
                    val_errors=val.tolist(),
                )
            )
    ResultFile(folder / "results.jsonl").add(made)


def test_a_known_better_arm_wins_a_null_arm_ties_and_a_worse_one_loses(tmp_path: Path) -> None:
    errors = {"heuristic": 0.2, "plateau": 0.2, "wait": 0.25, "random": 0.15}
    played(tmp_path, errors, members=MANY)
    own = proof(tmp_path, list(errors), members=MANY, seeds=6)
    assert own.run()  # everything is there already
    found = own.conclude()
    verdicts = {each["reference"]: each["verdict"] for each in found["comparisons"]}
    assert verdicts == {"plateau": "ties", "wait": "beats", "random": "loses"}
    assert found["fronts"]["parameters"] == ["wait", "random"]
    assert found["privileged_share"] is None
    report = write_report(found)
    fewer = {each["reference"]: each["errors_changed"] for each in found["comparisons"]}
    assert fewer == pytest.approx({"plateau": 0.0, "wait": -0.2, "random": 1 / 3}, abs=0.01)
    for words in ("heuristic beats wait: ", "heuristic ties with plateau", "loses to random"):
        assert words in report
    for label in found["members"]:
        assert f"| {label} | " in report


def test_a_proof_may_need_both_tests_and_says_so(tmp_path: Path) -> None:
    played(tmp_path, {"heuristic": 0.2, "wait": 0.25}, members=MANY)
    found = proof(tmp_path, ["heuristic", "wait"], members=MANY, seeds=6).conclude()
    assert not found["comparisons"][0]["needs_ranks"]
    assert "Wilcoxon's" not in write_report(found)
    found = proof(tmp_path, ["heuristic", "wait"], members=MANY, seeds=6, wilcoxon=True).conclude()
    assert found["comparisons"][0]["needs_ranks"]
    assert found["comparisons"][0]["ranks"]["p_value"] == 2 / 128
    assert "Wilcoxon's signed-rank test over members" in write_report(found)


def test_a_proof_chooses_which_comparisons_it_requires(tmp_path: Path) -> None:
    played(tmp_path, {"heuristic": 0.2, "wait": 0.25, "random": 0.3}, members=MANY)
    arms = ["heuristic", "wait", "random"]

    def required(**changes: object) -> set[str]:
        found = proof(tmp_path, arms, members=MANY, seeds=6, **changes).conclude()
        return {each["reference"] for each in found["comparisons"] if each["is_required"]}

    assert required() == {"wait", "random"}
    assert required(reported=("random",)) == {"wait"}
    with pytest.raises(UsageError, match="did you mean 'random'"):
        ProveConfig(reported=("rendom",))


def test_two_members_cannot_tell_and_the_report_says_so(tmp_path: Path) -> None:
    played(tmp_path, {"heuristic": 0.2, "wait": 0.25})
    found = proof(tmp_path, ["heuristic", "wait"], seeds=6).conclude()
    assert [each["verdict"] for each in found["comparisons"]] == ["ties"]
    assert "2 members are too few to say more" in write_report(found)


def test_every_kind_of_arm_is_played_and_an_interruption_changes_nothing(
    tmp_path: Path, schedule: str
) -> None:
    privileged = tmp_path / "privileged.json"
    privileged.write_text(json.dumps({each.label: GOOD[:1] for each in MEMBERS}))
    arms = [
        *(f"schedule:{schedule}", "random", "periodic:every=4", "plateau:patience=1"),
        *("heuristic:min_epoch=2", f"privileged:{privileged}", "static", "scratch:schedule"),
    ]
    few = {"seeds": 2, "sizes": (1.0, 2.0), "rates": (0.5, 1.0), "rate_seeds": 1}
    short = {"play": play_config(horizon=6, rows=24)}
    whole = proof(tmp_path / "whole", arms, **few, **short)
    assert whole.run()
    parts = tmp_path / "parts"
    for epochs in (3, 14):
        assert not proof(parts, arms, stop_after=epochs, **few, **short).run()
    again = proof(parts, arms, **few, **short)
    assert again.run()
    name = "results.jsonl"
    assert (parts / name).read_text() == (tmp_path / "whole" / name).read_text()
    found = again.conclude()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(whole.conclude()))
    named = ["schedule", "random", "periodic", "plateau", "heuristic", "privileged", "wait"]
    assert sorted(found["arms"]) == sorted([*named, "static x1", "static x2", "scratch schedule"])
    required = {each["reference"] for each in found["comparisons"] if each["is_required"]}
    assert required == {"random", "periodic", "plateau", "heuristic", "wait"}
    scratch, grown = found["arms"]["scratch schedule"], found["arms"]["schedule"]
    # The second seed is not blended yet, so it is no part of what was grown.
    assert 1.0 < scratch["parameters"] < grown["parameters"]
    assert scratch["germinated"] == 0
    assert found["best_static"]["arm"].startswith("static x")
    assert isinstance(found["privileged_share"], float)


def test_static_rates_are_chosen_by_member_with_seeds_of_their_own(tmp_path: Path) -> None:
    slow, usual = "static x2, rate x0.5", "static x2, rate x1"
    played(tmp_path, {slow: 0.3, usual: 0.2}, purpose="rates")
    played(tmp_path, {"wait": 0.3, "static x2": 0.2})
    own = proof(tmp_path, ["wait", "static"], seeds=6, sizes=(2.0,), rates=(0.5, 1.0))
    (arm,) = own._tuned()
    assert arm.rates == {each.label: each.task().config.learning_rate for each in MEMBERS}
    assert not {s for c in own._rate_cells() for s in c.seeds} & {
        s for c in own._cells([arm]) for s in c.seeds
    }
    assert own.run()
    assert own.conclude()["best_static"]["arm"] == "static x2"


def test_every_opening_of_the_claim_has_seeds_of_its_own(tmp_path: Path) -> None:
    seeds = [
        {
            seed
            for cell in proof(tmp_path, ["wait"], opening=opening)._cells([waiting()])
            for seed in cell.seeds
        }
        for opening in (0, 1, 2)
    ]
    assert len(set.union(*seeds)) == sum(map(len, seeds))


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        (["wait", "wait"], "two arms are called 'wait'"),
        (["static", "wait"], "the first arm is compared with the others"),
        (["halving", "wait"], "the first arm is compared with the others"),
        (["wait", "halving:2"], "arm 'halving' takes no argument"),
        (["wait", "scratch:heuristic"], "needs the arm 'heuristic'"),
        (["wait", "scratch"], "write scratch:ARM"),
        (["wait", "contextual"], "write contextual:FILE"),
        (["wait", "static:2"], "takes no argument"),
        (["wayt"], "there is no arm 'wayt'"),
    ],
)
def test_arms_that_make_no_sense(arms: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ProveConfig(arms=tuple(arms))


def test_files_that_hold_something_else(tmp_path: Path, schedule: str) -> None:
    with pytest.raises(UsageError, match="holds no rule by descriptors"):
        make_arm(parse_arm(f"contextual:{schedule}"))
    with pytest.raises(UsageError, match="has no plans by member"):
        make_arm(parse_arm(f"privileged:{schedule}"))
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps({"one": 2, "other": []}))
    with pytest.raises(UsageError, match="has both schedules and depths"):
        make_arm(parse_arm(f"privileged:{mixed}"))
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    arm = make_arm(parse_arm(f"privileged:{empty}"))
    with pytest.raises(UsageError, match="has no plan for 'width 2, all images'"):
        arm.schedule(MEMBERS[0])


def test_a_tuned_depth_has_its_best_rate_on_every_member(tmp_path: Path) -> None:
    slow, usual = "depth 2, tuned, rate x0.5", "depth 2, tuned, rate x1"
    texts = [GivenMember(name, TinyText()) for name in ("one", "other")]
    played(tmp_path, {slow: 0.2, usual: 0.3}, purpose="rates", members=texts[:1])
    played(tmp_path, {slow: 0.3, usual: 0.2}, purpose="rates", members=texts[1:])
    own = proof(tmp_path, ["wait", "depth:2,tuned"], members=texts, rates=(0.5, 1.0))
    (arm,) = own._tuned()
    rate = TinyText.defaults.learning_rate
    assert [arm.task(each).config.learning_rate / rate for each in texts] == [0.5, 1.0]
    with pytest.raises(UsageError, match="put a controller first"):
        ProveConfig(arms=("depth:2,tuned", "wait"))


def test_all_arms_spend_the_same_training_flops_within_a_step(tmp_path: Path) -> None:
    config = TinyText.defaults.replace(budget="6x", horizon=8)
    members = [GivenMember("text", TinyText(config))]
    plan = tmp_path / "deeper.json"
    plan.write_text(
        json.dumps(
            [{"epoch": 2, "op": "germinate", "slot": slot, "blueprint": "kin"} for slot in (0, 1)]
        )
    )
    arms = [
        *("slope:windows=1,margin=9,latest=0.8", f"schedule:{plan}", "plateau:blueprints=[kin]"),
        *("depth:4", "depth:2,tuned", "static", "halving", "scratch:schedule"),
    ]
    own = proof(
        tmp_path / "out",
        arms,
        members=members,
        seeds=2,
        sizes=(2.0,),
        rates=(2.0,),
        rate_seeds=1,
        play=play_config(population=QUICK.replace(copies=True)),
    )
    assert own.run()
    found = {each.arm: each for each in own.results.of("proof")}
    budget = members[0].task().compute_budget(config.validation_samples)
    runs = own.results.of("halving")
    assert [each.arm for each in runs] == [f"halving, depth {depth}" for depth in (1, 2, 4)]
    for name, each in found.items():
        step = 3 * config.batch_size * max(each.flops)
        if name == "halving":
            step = sum(3 * config.batch_size * max(run.flops) for run in runs)
            for place, error in enumerate(each.test_errors):
                assert error in [run.test_errors[place] for run in runs]
        for spent in each.training_flops:
            assert 0 <= budget - spent < step, name
        assert each.ablation_flops == [0.0, 0.0]
    sizes = {name: each.flops[0] / each.host_flops for name, each in found.items()}
    assert sizes["wait"] == 1.0
    assert sizes["slope"] > 1.3
    assert sizes["depth 4"] > sizes["depth 2, tuned"] > 1.3
    assert sizes["scratch schedule"] == pytest.approx(sizes["schedule"], rel=0.02)
    required = [spec.name for spec in own.specs if spec.kind not in REPORTED_ONLY]
    assert {"depth 4", "depth 2, tuned", "halving"} <= set(required)
    again = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert own.run()
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == again
