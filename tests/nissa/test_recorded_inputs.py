from __future__ import annotations

from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError, UsageError, as_command
from esper.nissa.recorded import (
    RunInputs,
    describe_versions,
)
from esper.tamiyo.controllers.policy_file import controller_fingerprint

INPUTS = RunInputs({"data": "abc"}, {"torch": "2.13.0", "python": "3.11.7"})


def test_the_same_world_has_no_differences(tmp_path: Path) -> None:
    assert INPUTS.differences(tmp_path, INPUTS.to_mapping(), ()) == {}


def test_other_content_is_refused_unless_it_was_meant(tmp_path: Path) -> None:
    other = RunInputs({"data": "xyz"}, INPUTS.versions)
    with as_command(), pytest.raises(UsageError, match=r"the data of .* --set data=\.\.\."):
        other.differences(tmp_path, INPUTS.to_mapping(), ())
    with pytest.raises(UsageError, match=r"saved \(was abc, is xyz\); restore it, or start"):
        other.differences(tmp_path, INPUTS.to_mapping(), ())
    assert other.differences(tmp_path, INPUTS.to_mapping(), {"data"}) == {}


def test_what_no_setting_names_has_to_be_put_back(tmp_path: Path) -> None:
    saved = RunInputs({"number of training batches": "4"}, INPUTS.versions)
    now = RunInputs({"number of training batches": "2"}, INPUTS.versions)
    with pytest.raises(UsageError, match=r"batches of .* changed .*\(was 4, is 2\)") as caught:
        now.differences(tmp_path, saved.to_mapping(), ())
    assert "--set" not in str(caught.value)


def test_of_two_dicts_only_what_differs_is_shown(tmp_path: Path) -> None:
    before, now = (f"AdamW {{'lr': '{rate}', 'betas': '(0.9, 0.999)'}}" for rate in (0.1, 0.2))
    saved, found = (RunInputs({"optimizer": one}, INPUTS.versions) for one in (before, now))
    with pytest.raises(UsageError, match=r"saved \(lr was 0.1, is 0.2\); restore it, or start"):
        found.differences(tmp_path, saved.to_mapping(), ())
    other = RunInputs({"optimizer": "SGD {'lr': '0.1'}"}, INPUTS.versions)
    with pytest.raises(UsageError, match=r"\(was AdamW \{.*\}, is SGD \{'lr': '0.1'\}\)"):
        other.differences(tmp_path, saved.to_mapping(), ())


def test_other_software_is_told(tmp_path: Path) -> None:
    found = RunInputs(INPUTS.contents, {"torch": "3.0", "python": "3.11.7"})
    differences = found.differences(tmp_path, INPUTS.to_mapping(), ())
    assert differences == {"torch": ("2.13.0", "3.0")}
    assert describe_versions(differences) == "torch 2.13.0 -> 3.0"


@pytest.mark.parametrize("saved", [{}, {"contents": 3, "versions": {}}, {"contents": {}}])
def test_a_checkpoint_that_does_not_say_is_refused(
    tmp_path: Path, saved: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="does not list the inputs of the run"):
        INPUTS.differences(tmp_path, saved, ())


def test_a_controller_is_known_by_what_its_file_holds(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {epoch: 1}")
    first = controller_fingerprint(f"schedule:{plan}")
    assert first is not None
    (tmp_path / "copy.yaml").write_text("- {epoch: 1}")
    assert controller_fingerprint(f"schedule:{tmp_path / 'copy.yaml'}") == first
    plan.write_text("- {epoch: 2}")
    assert controller_fingerprint(f"schedule:{plan}") not in (first, None)
    assert controller_fingerprint("heuristic") is None
    assert controller_fingerprint("x" * 5000) is None
