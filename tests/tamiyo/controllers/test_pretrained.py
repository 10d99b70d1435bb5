"""Controllers as folders that travel, and the one that ships."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.lab.tasks import get_family
from esper.lab.tasks.member import GROWTH_LIMIT
from esper.leyline.controller import ControllerContext, GrowthLimits
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import TOPOLOGIES
from esper.tamiyo.controllers import (
    LearnedController,
    Tamiyo,
    TamiyoController,
    TrialController,
    make_controller,
    new_policy,
    shipped_names,
)
from esper.tamiyo.networks.config import PolicyConfig
from esper.testing.controllers import check_controller
from tests.tamiyo.controllers.test_learned import context, situation

FILES = {"config.json", "model.safetensors", "train_config.json", "results.json", "README.md"}


@pytest.fixture(scope="module")
def shipped() -> Tamiyo:
    return Tamiyo.from_pretrained("tamiyo")


def test_one_ships_and_says_what_it_is(shipped: Tamiyo) -> None:
    assert shipped_names() == ("tamiyo",)
    assert esper.Tamiyo is Tamiyo
    assert shipped.policy.travels
    assert shipped.train_config["recipe"] == "arena"
    assert shipped.results["split"] == "claim"
    for heading in ("## Trained on", "## Results", "## Limits"):
        assert heading in shipped.card


def test_its_card_states_what_its_results_say(shipped: Tamiyo) -> None:
    for each in shipped.results["comparisons"]:
        found = each["over_members"]
        told = f"{found['estimate']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
        assert told in shipped.card
    (family,) = shipped.train_config["tasks"]
    trained_on = {member.label for member in get_family(family).members("train")}
    assert trained_on
    assert not trained_on & set(shipped.results["members"]), "it is judged on what it never saw"


def test_the_endpoint_that_was_fixed_beforehand_is_met(shipped: Tamiyo) -> None:
    """Decision 0013, by what ships; the page of results has the same numbers."""
    found = shipped.results
    assert (found["opening"], len(found["members"]), found["seeds"]) == (2, 24, 8)
    required = {each["reference"]: each for each in found["comparisons"] if each["is_required"]}
    assert set(required) == {"wait", "random", "periodic", "plateau", "heuristic", "schedule"}
    page = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
    for each in required.values():
        interval = each["over_members"]
        assert each["verdict"] == "beats"
        assert interval["low"] > 0
        assert each["adjusted_p"] < 0.05
        told = f"{interval['estimate']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"
        assert f"{told} | {each['adjusted_p']:.4f} |" in page
    restraint = found["restraint"]["useless or harmful"]
    assert restraint["parameters_added"] <= 0.05
    assert restraint["points_gained"] >= -0.3


def test_it_knows_the_limits_and_the_runs_it_learned_in(shipped: Tamiyo, tmp_path: Path) -> None:
    members = get_family(shipped.train_config["tasks"][0]).members("train")
    assert shipped.policy.horizon == min(member.horizon for member in members)
    assert shipped.policy.limits == GrowthLimits(**shipped.results["limits"])
    assert shipped.policy.limits == GrowthLimits(parameters=GROWTH_LIMIT, flops=GROWTH_LIMIT)
    shipped.save_pretrained(tmp_path / "copy")
    copied = Tamiyo.from_pretrained(tmp_path / "copy").policy
    assert (copied.limits, copied.horizon) == (shipped.policy.limits, shipped.policy.horizon)


def test_battery() -> None:
    check_controller("tamiyo")


@pytest.mark.parametrize("slots", [1, 3, 7, 16])
@pytest.mark.filterwarnings("ignore:.*unlike those that tamiyo has learned on")
def test_it_serves_hosts_of_1_to_16_slots(shipped: Tamiyo, slots: int) -> None:
    controller = make_controller(shipped, context(slots))
    assert isinstance(controller, TamiyoController)
    controller.reset(4, "cpu")
    controller.act(*situation(4, slots))


def test_it_decides_as_it_did_when_it_was_made(shipped: Tamiyo) -> None:
    """Log-probabilities of a fixed sequence: a change of features or network shows here."""
    policy = shipped.policy
    hidden, found = None, []
    for seed in range(3):
        signals, masks = situation(4, 3, seed)
        raw, blueprints = policy.layout.observe(signals)
        step = policy.network.get_action(
            policy.normalizer.normalize(raw),
            masks,
            blueprints,
            hidden,
            deterministic=True,
            explore=False,
        )
        hidden = step.hidden
        found.append(step.op_chances)
    golden = json.loads((Path(__file__).parent / "golden_tamiyo.json").read_text())
    torch.testing.assert_close(torch.stack(found), torch.tensor(golden), rtol=1e-4, atol=1e-5)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    policy = new_policy(PolicyConfig(lstm_hidden_dim=16, layout="travelling"), seed=3)
    policy.normalizer.update(policy.layout.observe(situation(20)[0])[0])
    made = Tamiyo(policy, "# Mine", {"seed": 3}, {"gain": 1.5})
    for _ in range(2):
        made.save_pretrained(tmp_path / "mine")
    assert {place.name for place in (tmp_path / "mine").iterdir()} == FILES
    again = Tamiyo.from_pretrained(tmp_path / "mine")
    assert (again.card, again.train_config, again.results) == ("# Mine", {"seed": 3}, {"gain": 1.5})
    for part in ("network", "normalizer"):
        one, two = (getattr(each.policy, part).state_dict() for each in (made, again))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    named = make_controller(f"tamiyo:{tmp_path / 'mine'}", context())
    assert isinstance(named, TamiyoController)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no controller 'tamio': Esper ships tamiyo, and"):
        Tamiyo.from_pretrained("tamio")


def change(folder: Path, edit: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def rename_feature(config: dict[str, Any]) -> None:
    config["observation"]["features"][4] = "host.weather"
    config["observation"]["hash"] = "0"


def drop_choice(config: dict[str, Any]) -> None:
    config["actions"]["choices"].pop()
    config["actions"]["hash"] = "0"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (rename_feature, "reads 'host.weather' where this Esper has"),
        (drop_choice, r"chooses \d+ entries where this Esper has \d+"),
        (lambda config: config.update(schema=9), "schema 9; this Esper reads 'tamiyo' of schema 1"),
        (lambda config: config.pop("network"), "is not complete"),
        (lambda config: config.pop("limits"), "cannot be used: 'limits'"),
        (lambda config: config["network"].update(lstm_hidden_dim=64), "cannot be used"),
        (lambda config: config["network"].update(colour="red"), "is not complete"),
    ],
)
def test_one_that_differs_is_refused_by_what_differs(
    tmp_path: Path, shipped: Tamiyo, edit: Any, says: str
) -> None:
    shipped.save_pretrained(tmp_path / "other")
    change(tmp_path / "other", edit)
    with pytest.raises(CheckpointError, match=says):
        Tamiyo.from_pretrained(tmp_path / "other")


@pytest.mark.parametrize("name", sorted(FILES - {"README.md"}))
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\x00\xff", b"[]"])
def test_damage_is_one_line(tmp_path: Path, shipped: Tamiyo, name: str, content: bytes) -> None:
    shipped.save_pretrained(tmp_path / "bad")
    (tmp_path / "bad" / name).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        Tamiyo.from_pretrained(tmp_path / "bad")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("kinds", 0), "x"),
        (("kinds", 0), 3),
        (("kinds",), None),
        (("horizon",), "x"),
        (("horizon",), -1),
        (("horizon",), 2**80),
        (("limits",), 3),
        (("limits", "parameters"), "x"),
        (("blueprints", 1), [1]),
        (("network", "num_slots"), 2**31),
        (("network", "num_slots"), "x"),
        (("network", "lstm_hidden_dim"), 2**31),
        (("observation",), 3),
        (("observation", "features"), 3),
        (("actions", "choices"), None),
    ],
    ids=str,
)
def test_a_value_that_is_none_of_a_controller_is_one_line(
    tmp_path: Path, shipped: Tamiyo, place: tuple[Any, ...], value: Any
) -> None:
    shipped.save_pretrained(tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    config = json.loads(path.read_bytes())
    inner = config
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=str(tmp_path)) as error:
        Tamiyo.from_pretrained(tmp_path / "bad")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path, shipped: Tamiyo) -> None:
    shipped.save_pretrained(tmp_path / "part")
    (tmp_path / "part" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Tamiyo.from_pretrained(tmp_path / "part")
    shutil.rmtree(tmp_path / "part")
    with pytest.raises(UsageError, match="there is no controller"):
        Tamiyo.from_pretrained(tmp_path / "part")


def test_a_maker_is_no_controller_until_it_has_a_host(shipped: Tamiyo) -> None:
    made = make_controller(shipped, ControllerContext(slot_names=("a", "b")))
    assert made.state_dict()["state"] is None
    with pytest.raises(UsageError, match="must be a name or an object"):
        make_controller(Tamiyo, ControllerContext(slot_names=("a",)))  # type: ignore[arg-type]


# -- networks unlike those that it learned on ------------------------------------------------------


@pytest.fixture(scope="module")
def first_decision() -> tuple[Signals, Masks]:
    """Two networks after their first epoch, the second of them much larger than any it saw."""
    population = esper.Population("digits_mlp", 2, device="cpu", strategy="stacked", horizon=60)
    signals, masks = population.reset(), population.masks()
    population.close()
    large = torch.tensor([int(signals.params[0]), int(0.8 * signals.budget[1])])
    within = {"param_limit": 2 * large, "flop_limit": 2 * signals.flops}
    return replace(signals, params=large, host_params=large.clone(), **within), masks


def pair(shipped: Tamiyo) -> tuple[TamiyoController, LearnedController]:
    own = shipped.controller(context(3))
    policy = LearnedController(shipped.policy, context(3), greedy=True)
    for controller in (own, policy):
        controller.reset(2, "cpu")
    return own, policy


def test_rules_decide_for_a_network_unlike_all_that_it_saw(
    shipped: Tamiyo, first_decision: tuple[Signals, Masks]
) -> None:
    signals, masks = first_decision
    own, policy = pair(shipped)
    rules = TrialController(context(3))
    rules.reset(2, "cpu")
    with pytest.warns(
        EsperWarning, match=r"1 of 2 networks are unlike .* \(its number of parameters is \d+\."
    ):
        found = own.act(signals, masks)
    learned, written = policy.act(signals, masks), rules.act(signals, masks)
    assert (own.decides(0), own.decides(1)) == (True, False)
    for head, values in found.items():
        assert values.tolist() == [int(learned[head][0]), int(written[head][1])]
    assert own.reasons() == [policy.reasons()[0], rules.reasons()[1]]
    # It is told once, and decided by what was known at first.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.act(replace(signals, params=signals.params[[0, 0]]), masks)
    assert not own.decides(1)


@pytest.mark.parametrize(
    ("slots", "sees"),
    [
        (["cnn", "cnn"], True),
        (["vector", "vector"], False),
        (["cnn", "sequence"], True),
        (["sequence", "sequence"], False),
    ],
)
def test_it_sees_the_size_of_the_training_set_where_a_slot_is_for_images(
    shipped: Tamiyo, first_decision: tuple[Signals, Masks], slots: list[str], sees: bool
) -> None:
    """It has learned how many images are enough, and passed on every text."""
    signals, masks = first_decision
    names = ("params", "host_params", "param_limit", "flop_limit")
    signals = replace(signals, **{name: getattr(signals, name)[[0, 0]] for name in names})
    topology = torch.full_like(signals.slot_topology, TOPOLOGIES.index(slots[0]))
    topology[:, -1] = TOPOLOGIES.index(slots[1])

    def chance(samples: int) -> float:
        told = torch.full_like(signals.train_samples, samples)
        own = pair(shipped)[0]
        own.act(
            replace(signals, slot_topology=topology, train_samples=told, samples_per_epoch=told),
            masks,
        )
        return own.explain().probabilities["op"]["GERMINATE"]

    assert (chance(3000) != chance(0)) == sees


def test_what_was_found_of_a_network_is_remembered(
    shipped: Tamiyo, first_decision: tuple[Signals, Masks]
) -> None:
    own, other = pair(shipped)[0], pair(shipped)[0]
    with pytest.warns(EsperWarning, match="unlike those"):
        own.act(*first_decision)
    other.load_state_dict(own.state_dict())
    assert (other.decides(0), other.decides(1)) == (True, False)
    mine, theirs = own.act(*first_decision), other.act(*first_decision)
    assert all(torch.equal(mine[head], theirs[head]) for head in mine)


def test_limits_beyond_those_it_learned_under_do_not_make_it_wait(
    shipped: Tamiyo, first_decision: tuple[Signals, Masks]
) -> None:
    signals, masks = first_decision
    wide = replace(signals, params=signals.params[[0, 0]], host_params=signals.params[[0, 0]])
    wide = replace(wide, param_limit=20 * wide.params)
    own = pair(shipped)[0]
    with pytest.warns(EsperWarning, match=r"2 of 2 networks .*\(its limit on parameters is"):
        own.act(wide, masks)
    assert not own.decides()
