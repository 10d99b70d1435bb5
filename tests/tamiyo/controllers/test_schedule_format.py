from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import UsageError
from esper.leyline.stages import ALPHA_TARGETS, SPEED_TICKS, TEMPO_EPOCHS, AlphaCurve, BlendStyle
from esper.tamiyo.controllers.schedule import (
    Share,
    describe_schedule,
    load_schedule,
    parse_schedule,
)
from tests.tamiyo.controllers.scenes import blueprint_id

CONTEXT = ControllerContext(slot_names=("layer1", "layer2", "0"))

GOOD = [
    {
        "epoch": 5,
        "op": "germinate",
        "slot": "layer2",
        "blueprint": "conv_light",
        "style": "GATED_GATE",
        "tempo": 8,
        "alpha_target": 0.5,
    },
    {"epoch": 6, "op": "advance", "slot": 1},
    {"epoch": 7, "op": "set_alpha_target", "slot": "0", "alpha_target": 1, "alpha_speed": 0},
    {"epoch": 8, "op": "prune", "slot": 0, "alpha_speed": 5, "alpha_curve": "sigmoid_gentle"},
    {"epoch": 8, "op": "fossilize", "slot": 2},
]


def write(folder: Path, document: object, name: str = "plan.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan"])
def test_names_become_indices(tmp_path: Path, name: str) -> None:
    entries = load_schedule(write(tmp_path, GOOD, name), CONTEXT)
    assert [entry.op.name.lower() for entry in entries] == [item["op"] for item in GOOD]
    assert [entry.epoch for entry in entries] == [5, 6, 7, 8, 8]
    assert [entry.number for entry in entries] == [1, 2, 3, 4, 5]
    germinate, advance, target, prune, fossilize = entries
    assert (germinate.slot, germinate.blueprints) == (1, (blueprint_id("conv_light"),))
    assert germinate.choice == {
        "style": BlendStyle.GATED_GATE,
        "tempo": TEMPO_EPOCHS.index(8),
        "alpha_target": ALPHA_TARGETS.index(0.5),
    }
    assert (advance.slot, advance.choice) == (1, {})
    assert target.slot == 2  # text is a name, even one that looks like a number
    assert target.choice == {
        "alpha_target": ALPHA_TARGETS.index(1.0),
        "alpha_speed": SPEED_TICKS.index(0),
    }
    assert prune.slot == 0
    assert prune.choice["alpha_curve"] == AlphaCurve.SIGMOID_GENTLE
    assert fossilize.slot == 2
    assert not any(entry.is_tended for entry in entries)


def test_shares_are_of_the_horizon_and_of_the_depth() -> None:
    plain = {"epoch": "25%", "op": "GROW", "slot": "50%", "blueprint": ["conv_heavy", "Norm"]}
    (entry,) = parse_schedule([plain], CONTEXT)
    assert entry.is_tended
    assert entry.op is LifecycleOp.GERMINATE
    assert (entry.epoch, entry.slot) == (Share(25.0), Share(50.0))
    assert entry.blueprints == (blueprint_id("conv_heavy"), blueprint_id("norm"))
    assert [entry.first_epoch(horizon) for horizon in (2, 10, 60)] == [1, 3, 15]
    assert [entry.slots_of(slots) for slots in (1, 2, 3, 4, 5)] == [(0,), (1,), (1,), (2,), (2,)]


def test_an_index_that_a_host_does_not_have_is_no_slot() -> None:
    (entry,) = parse_schedule([{"epoch": 1, "op": "prune", "slot": 2}], CONTEXT)
    assert [entry.slots_of(slots) for slots in (2, 3)] == [(), (2,)]


def test_all_slots_are_those_of_the_host_the_last_one_first() -> None:
    plain = {"epoch": "10%", "op": "germinate", "slot": "all", "blueprint": "norm"}
    (entry,) = parse_schedule([plain], CONTEXT)
    assert [entry.slots_of(slots) for slots in (1, 3)] == [(0,), (2, 1, 0)]
    named = ControllerContext(slot_names=("all", "other"))
    (entry,) = parse_schedule([{**plain, "slot": "all"}], named)
    assert entry.slots_of(2) == (0,), "a slot of this name is meant where there is one"


def test_a_schedule_in_one_line() -> None:
    plain = [
        {"epoch": "10%", "op": "grow", "slot": "100%", "blueprint": ["conv_heavy", "mlp"]},
        {"epoch": 20, "op": "PRUNE", "slot": "r0c0", "alpha_speed": 3},
    ]
    assert describe_schedule(plain) == (
        "grow conv_heavy/mlp at 100% from 10%; prune at r0c0 from 20 (alpha_speed 3)"
    )
    assert describe_schedule([]) == "wait"


SOUND = {
    "germinate": {"epoch": 1, "op": "germinate", "slot": 0, "blueprint": "norm"},
    "set_alpha_target": {"epoch": 1, "op": "set_alpha_target", "slot": 0, "alpha_target": 0.7},
    "prune": {"epoch": 1, "op": "prune", "slot": 0},
}


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        ("germinate", {"op": "germinat"}, ["field 'op'", "did you mean 'germinate'?"]),
        ("germinate", {"op": "wait"}, ["field 'op'", "grow, germinate, set_alpha_target"]),
        ("germinate", {"op": 3}, ["field 'op'", "got 3"]),
        ("germinate", {"blueprint": None}, ["field 'blueprint'", "got None"]),
        ("germinate", {"tempoo": 3}, ["takes no field 'tempoo'", "did you mean 'tempo'?"]),
        ("germinate", {"alpha_speed": 3}, ["germinate takes no field 'alpha_speed'"]),
        ("germinate", {"epoch": "soon"}, ["field 'epoch'", "whole number"]),
        ("germinate", {"epoch": "120%"}, ["field 'epoch'", "got '120%'"]),
        ("germinate", {"slot": "-1%"}, ["field 'slot'", "got '-1%'"]),
        ("germinate", {"blueprint": []}, ["field 'blueprint'", "got []"]),
        ("germinate", {"epoch": -1}, ["field 'epoch'", "got -1"]),
        ("germinate", {"epoch": True}, ["field 'epoch'", "got True"]),
        ("germinate", {"slot": "layer3"}, ["field 'slot'", "layer1, layer2", "did you mean"]),
        ("germinate", {"slot": 3}, ["field 'slot'", "0 to 2", "layer1, layer2"]),
        ("germinate", {"slot": -1}, ["field 'slot'", "got -1"]),
        ("germinate", {"slot": True}, ["field 'slot'", "got True"]),
        ("germinate", {"blueprint": "conv_lite"}, ["did you mean 'conv_light'?"]),
        ("germinate", {"blueprint": "noop"}, ["field 'blueprint'", "got 'noop'"]),
        ("germinate", {"style": "sigmoid"}, ["field 'style'", "did you mean 'sigmoid_add'?"]),
        ("germinate", {"tempo": 4}, ["field 'tempo'", "3, 5, 8", "got 4"]),
        ("germinate", {"tempo": "5"}, ["field 'tempo'", "got '5'"]),
        ("germinate", {"alpha_target": 0.6}, ["field 'alpha_target'", "0.5, 0.7, 1.0"]),
        ("germinate", {"alpha_target": True}, ["field 'alpha_target'", "got True"]),
        ("prune", {"alpha_speed": 4}, ["field 'alpha_speed'", "0, 3, 5, 8"]),
        ("prune", {"alpha_curve": "cosinus"}, ["field 'alpha_curve'", "did you mean 'cosine'?"]),
        ("prune", {"alpha_target": 1.0}, ["prune takes no field 'alpha_target'"]),
        ("set_alpha_target", {"tempo": 3}, ["set_alpha_target takes no field 'tempo'"]),
    ],
)
def test_mistakes_are_one_line_with_file_entry_and_field(
    tmp_path: Path, op: str, change: dict[str, object], words: list[str]
) -> None:
    assert_refused(tmp_path, {**SOUND[op], **change}, words)


@pytest.mark.parametrize(("op", "key"), [(op, key) for op in SOUND for key in SOUND[op]])
def test_missing_fields(tmp_path: Path, op: str, key: str) -> None:
    entry = {name: value for name, value in SOUND[op].items() if name != key}
    assert_refused(tmp_path, entry, [f"field {key!r} is missing"])


def test_an_entry_that_is_no_mapping(tmp_path: Path) -> None:
    assert_refused(tmp_path, "advance", ["must be a mapping", "'advance'"])


def assert_refused(folder: Path, entry: object, words: list[str]) -> None:
    path = write(folder, [GOOD[0], entry])
    with pytest.raises(UsageError) as error:
        load_schedule(path, CONTEXT)
    text = str(error.value)
    assert text.startswith(f"{path}: entry 2: ")
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("plan.yaml", "", "must be a list"),
        ("plan.yaml", "[]", "must be a list"),
        ("plan.yaml", "epoch: 3\nop: prune\n", "must be a list"),
        ("plan.yaml", "- {epoch: 1\n- x: [", "not valid YAML"),
        ("plan.yaml", "- !!python/object:os.system {}", "not valid YAML"),
        ("plan.json", "[{]", "not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path, text, name)
    with pytest.raises(UsageError, match=words) as error:
        load_schedule(path, CONTEXT)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml: there is no such schedule file"):
        load_schedule(tmp_path / "nowhere.yaml", CONTEXT)
    with pytest.raises(UsageError, match="cannot read"):
        load_schedule(tmp_path, CONTEXT)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        load_schedule(binary, CONTEXT)
