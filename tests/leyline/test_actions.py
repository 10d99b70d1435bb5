import pytest
import torch

from esper.leyline.actions import (
    CAUSAL_HEADS,
    HEAD_NAMES,
    HEAD_SIZES,
    HEAD_VALUES,
    NUM_OPS,
    PLACEHOLDERS,
    LifecycleOp,
    causal_table,
    choice_text,
    decode_actions,
    describe_action,
    head_values,
    placeholder_actions,
)
from esper.leyline.errors import UsageError

FIXED_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")


def test_ops_are_the_documents() -> None:
    assert {op.name: op.value for op in LifecycleOp} == {
        "WAIT": 0,
        "GERMINATE": 1,
        "SET_ALPHA_TARGET": 2,
        "PRUNE": 3,
        "FOSSILIZE": 4,
        "ADVANCE": 5,
    }
    assert NUM_OPS == 6


def test_heads_are_the_documents_in_their_order() -> None:
    assert list(HEAD_SIZES.items()) == [
        ("slot", 3),
        ("blueprint", 13),
        ("style", 4),
        ("tempo", 3),
        ("alpha_target", 3),
        ("alpha_speed", 4),
        ("alpha_curve", 5),
        ("op", 6),
    ]
    assert tuple(HEAD_SIZES) == HEAD_NAMES


def test_causal_table_golden() -> None:
    # Columns in the order of HEAD_NAMES: slot blueprint style tempo target speed curve op.
    expected = [
        [0, 0, 0, 0, 0, 0, 0, 1],  # WAIT
        [1, 1, 1, 1, 1, 0, 0, 1],  # GERMINATE
        [1, 0, 1, 0, 1, 1, 1, 1],  # SET_ALPHA_TARGET
        [1, 0, 0, 0, 0, 1, 1, 1],  # PRUNE
        [1, 0, 0, 0, 0, 0, 0, 1],  # FOSSILIZE
        [1, 0, 0, 0, 0, 0, 0, 1],  # ADVANCE
    ]
    table = causal_table()
    assert table.dtype == torch.bool
    assert table.int().tolist() == expected


def test_every_op_says_which_heads_matter() -> None:
    assert set(CAUSAL_HEADS) == set(LifecycleOp)


def test_placeholders_are_the_documents() -> None:
    assert {head: int(index) for head, index in PLACEHOLDERS.items()} == {
        "slot": 0,
        "blueprint": 0,
        "style": 2,
        "tempo": 1,
        "alpha_target": 2,
        "alpha_speed": 0,
        "alpha_curve": 0,
        "op": 0,
    }


def test_placeholder_actions_make_every_row_wait() -> None:
    actions = placeholder_actions(4)
    assert tuple(actions) == HEAD_NAMES
    for head, tensor in actions.items():
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == [int(PLACEHOLDERS[head])] * 4


def test_decode_golden() -> None:
    actions = {
        "slot": torch.tensor([0, 1, 2, 7]),
        "blueprint": torch.tensor([0, 1, 12, 20]),
        "style": torch.tensor([0, 1, 2, 3]),
        "tempo": torch.tensor([0, 1, 2, 0]),
        "alpha_target": torch.tensor([0, 1, 2, 0]),
        "alpha_speed": torch.tensor([0, 1, 2, 3]),
        "alpha_curve": torch.tensor([4, 3, 2, 1]),
        "op": torch.tensor([1, 2, 3, 5]),
    }
    command = decode_actions(actions)
    assert command.op.tolist() == [1, 2, 3, 5]
    assert command.slot.tolist() == [0, 1, 2, 7]
    assert command.blueprint.tolist() == [0, 1, 12, 20]
    assert command.algorithm.tolist() == [0, 1, 0, 2]
    assert command.ramp.tolist() == [0, 0, 3, 0]
    assert command.tempo.tolist() == [3, 5, 8, 3]
    assert command.target.tolist() == [0.5, 0.7, 1.0, 0.5]
    assert command.target.dtype == torch.float64
    assert command.speed.tolist() == [0, 3, 5, 8]
    assert command.curve.tolist() == [4, 3, 2, 1]


def test_decode_of_the_placeholder() -> None:
    command = decode_actions(placeholder_actions(1))
    assert (command.op.item(), command.tempo.item(), command.target.item()) == (0, 5, 1.0)
    assert (command.algorithm.item(), command.ramp.item(), command.speed.item()) == (0, 3, 0)


def test_no_rows_decode_to_no_commands() -> None:
    assert decode_actions(placeholder_actions(0)).target.shape == (0,)


@pytest.mark.parametrize("head", FIXED_HEADS)
@pytest.mark.parametrize("end", ["below", "above"])
def test_index_out_of_range_names_the_head_and_its_range(head: str, end: str) -> None:
    actions = placeholder_actions(3)
    actions[head][1] = -1 if end == "below" else HEAD_SIZES[head]
    with pytest.raises(UsageError, match=rf"'{head}' takes 0 to {HEAD_SIZES[head] - 1}, got"):
        decode_actions(actions)


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_a_missing_head_is_named(head: str) -> None:
    actions = placeholder_actions(1)
    del actions[head]
    with pytest.raises(UsageError, match=rf"missing {head}$"):
        decode_actions(actions)


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.uint8),
        torch.zeros(2),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64),
    ],
    ids=["bool", "uint8", "float", "rows", "rank"],
)
def test_wrong_type_or_shape_is_refused(head: str, wrong: torch.Tensor) -> None:
    actions = {**placeholder_actions(2), head: wrong}
    with pytest.raises(UsageError, match="must be int64 with one index per row"):
        decode_actions(actions)


def test_an_action_is_described_by_what_its_op_uses() -> None:
    values = head_values(["stem", "body"], ["noop", "norm"])
    assert set(values) == set(HEAD_NAMES)
    indices = dict.fromkeys(HEAD_NAMES, 1)
    assert describe_action(indices, values) == {
        "op": "GERMINATE",
        "slot": "body",
        "blueprint": "norm",
        "style": "LINEAR_MULTIPLY",
        "tempo": 5,
        "alpha_target": 0.7,
        "alpha_speed": None,
        "alpha_curve": None,
    }
    waits = describe_action({**indices, "op": 0}, values)
    assert waits == {**dict.fromkeys(HEAD_NAMES), "op": "WAIT"}


def test_what_an_index_means_is_what_is_carried_out() -> None:
    for index, epochs in enumerate(HEAD_VALUES["tempo"]):
        actions = {**placeholder_actions(1), "tempo": torch.tensor([index])}
        assert decode_actions(actions).tempo.tolist() == [epochs]
    for index, ticks in enumerate(HEAD_VALUES["alpha_speed"]):
        actions = {**placeholder_actions(1), "alpha_speed": torch.tensor([index])}
        assert decode_actions(actions).speed.tolist() == [ticks]
    for index, target in enumerate(HEAD_VALUES["alpha_target"]):
        actions = {**placeholder_actions(1), "alpha_target": torch.tensor([index])}
        assert decode_actions(actions).target.tolist() == [target]


def test_choices_are_told_with_their_unit() -> None:
    told = [
        choice_text("tempo", 5),
        choice_text("alpha_speed", 3),
        choice_text("alpha_target", 0.7),
    ]
    assert told == ["5 epochs", "3 ticks", "0.7"]
    assert choice_text("style", "SIGMOID_ADD") == "SIGMOID_ADD"
