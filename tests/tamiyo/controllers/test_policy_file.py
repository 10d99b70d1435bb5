from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline.controller import ControllerContext, GrowthLimits
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NUM_BLUEPRINTS
from esper.tamiyo.controllers.policy_file import (
    POLICY_VERSION,
    Policy,
    load_policy,
    new_policy,
    save_policy,
)
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.observation import DocumentsLayout, ObservationNormalizer
from esper.utils.manifest import MANIFEST_FILE
from esper.utils.storage import load_tree, save_tree

SMALL = PolicyConfig(lstm_hidden_dim=16, num_slots=5, critic="state")


def test_a_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = new_policy(SMALL, seed=3)
    policy.normalizer.update(torch.randn(50, 181))
    save_policy(tmp_path / "policy", policy, meta={"rounds": 7})
    again = load_policy(tmp_path / "policy")
    assert again.network.config == SMALL
    assert again.blueprint_names == BUILTIN_BLUEPRINTS
    for mine, theirs in (
        (policy.network.state_dict(), again.network.state_dict()),
        (policy.normalizer.state_dict(), again.normalizer.state_dict()),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    raw = torch.randn(4, 181)
    assert torch.equal(policy.normalizer.normalize(raw), again.normalizer.normalize(raw))
    manifest = json.loads((tmp_path / "policy" / MANIFEST_FILE).read_text())
    assert (manifest["kind"], manifest["version"], manifest["meta"]) == (
        "policy",
        POLICY_VERSION,
        {"rounds": 7},
    )


def test_the_limits_and_the_length_of_runs_it_learned_under_travel_with_it(tmp_path: Path) -> None:
    limits = GrowthLimits(parameters=2.0, flops=3.0)
    travelling = PolicyConfig(lstm_hidden_dim=16, layout="travelling")
    save_policy(tmp_path / "policy", replace(new_policy(travelling), limits=limits, horizon=40))
    again = load_policy(tmp_path / "policy")
    assert (again.limits, again.horizon) == (limits, 40)
    fitted = again.fitted(ControllerContext(slot_names=("a",)))
    assert fitted is not again
    assert (fitted.limits, fitted.horizon) == (limits, 40)
    tree, _ = load_tree(tmp_path / "policy", kind="policy", version=POLICY_VERSION)
    del tree["limits"], tree["horizon"]
    save_tree(tmp_path / "silent", tree, kind="policy", version=POLICY_VERSION)
    silent = load_policy(tmp_path / "silent")
    assert (silent.limits, silent.horizon) == (GrowthLimits(), 0)
    tree["limits"] = {"parameters": 0.5}
    save_tree(tmp_path / "wrong", tree, kind="policy", version=POLICY_VERSION)
    with pytest.raises(CheckpointError, match=r"parameters must be at least 1, got 0\.5"):
        load_policy(tmp_path / "wrong")


def test_equal_seeds_give_equal_weights_and_leave_the_global_numbers_alone() -> None:
    state = torch.get_rng_state()
    one, two, other = new_policy(SMALL, seed=1), new_policy(SMALL, seed=1), new_policy(SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [each.network.lstm.weight_hh_l0 for each in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_table_of_its_own_blueprints(tmp_path: Path) -> None:
    names = (*BUILTIN_BLUEPRINTS, "mine")
    policy = new_policy(blueprint_names=names)
    assert policy.network.blueprint_head[-1].out_features == 14
    save_policy(tmp_path / "policy", policy)
    assert load_policy(tmp_path / "policy").blueprint_names == names


def test_parts_must_belong_together() -> None:
    policy = new_policy(SMALL)
    with pytest.raises(UsageError, match=f"knows {NUM_BLUEPRINTS} blueprints"):
        Policy(policy.network, policy.normalizer, ("noop", "norm"))
    with pytest.raises(UsageError, match="first blueprint must be 'noop'"):
        Policy(policy.network, policy.normalizer, tuple(reversed(BUILTIN_BLUEPRINTS)))
    with pytest.raises(UsageError, match="181 features"):
        Policy(policy.network, ObservationNormalizer(DocumentsLayout(3)))
    with pytest.raises(UsageError, match="the network reads 112"):
        new_policy(PolicyConfig(state_dim=112, lstm_hidden_dim=16))


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, new_policy(SMALL))
    tree, _ = load_tree(folder, kind="policy", version=POLICY_VERSION)

    def refused(**changes: object) -> str:
        save_tree(folder, {**tree, **changes}, kind="policy", version=POLICY_VERSION)
        with pytest.raises(CheckpointError) as error:
            load_policy(folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    features = list(tree["features"])
    assert "reads 'moon' where this Esper has" in refused(
        features=[*features[:3], "moon", *features[4:]]
    )
    assert "reads 180 entries where this Esper has 181" in refused(features=features[:-1])
    assert "has no key 'color'" in refused(config={**tree["config"], "color": "blue"})
    weights = dict(tree["weights"])
    del weights["lstm_ln.bias"]
    assert "lstm_ln.bias" in refused(weights=weights)
    assert f"knows {NUM_BLUEPRINTS} blueprints" in refused(blueprints=["noop"])


def test_other_kinds_and_versions_are_refused(tmp_path: Path) -> None:
    save_tree(tmp_path / "garden", {}, kind="garden", version=1)
    with pytest.raises(CheckpointError, match="a saved 'garden' where a 'policy' is needed"):
        load_policy(tmp_path / "garden")
    save_tree(tmp_path / "newer", {}, kind="policy", version=99)
    with pytest.raises(CheckpointError, match="update Esper"):
        load_policy(tmp_path / "newer")


# --------------------------------------------------------------------------------------- travelling

TRAVELS = PolicyConfig(layout="travelling", lstm_hidden_dim=16, slot_width=8)


def test_a_travelling_policy_is_laid_out_for_any_host(tmp_path: Path) -> None:
    policy = new_policy(TRAVELS, seed=3)
    policy.normalizer.update(torch.rand(50, policy.layout.size))
    save_policy(tmp_path / "policy", policy)
    again = load_policy(tmp_path / "policy")
    names = (*BUILTIN_BLUEPRINTS, "stranger")
    for slots in (1, 16):
        context = ControllerContext(
            slot_names=tuple(f"s{slot}" for slot in range(slots)), blueprint_names=names
        )
        fitted = again.fitted(context)
        assert fitted.network.config.head_sizes["slot"] == slots
        assert fitted.blueprint_names == names
        assert fitted.blueprint_kinds[-1] == "other"
        mine, theirs = policy.network.state_dict(), fitted.network.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert fitted.fitted(context) is fitted


def test_a_fitted_copy_goes_its_own_way() -> None:
    policy = new_policy(TRAVELS)
    other = policy.fitted(ControllerContext(slot_names=("a", "b")))
    with torch.no_grad():
        other.network.value_head[-1].bias.add_(1.0)
    assert not torch.equal(other.network.value_head[-1].bias, policy.network.value_head[-1].bias)


def test_the_documents_policy_stays_what_it_is() -> None:
    policy = new_policy(SMALL)
    assert policy.fitted(ControllerContext(slot_names=("a",))) is policy
    with pytest.raises(UsageError, match="serves 5 slots, and the network has 6"):
        policy.fitted(ControllerContext(slot_names=tuple("abcdef")))


def test_kinds_that_this_version_does_not_know_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, new_policy(TRAVELS))
    tree, _ = load_tree(folder, kind="policy", version=POLICY_VERSION)
    tree["features"][-1] = "kind.quantum"
    save_tree(folder, tree, kind="policy", version=POLICY_VERSION)
    with pytest.raises(CheckpointError, match=r"reads 'kind\.quantum' where"):
        load_policy(folder)
