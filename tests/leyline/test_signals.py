"""The fields, shapes and types of `Signals` are promises: written down here once more."""

import ast
import dataclasses
import inspect
import re

import pytest
import torch
from torch import Tensor

from esper.leyline import signals
from esper.leyline.signals import HISTORY, Signals

ROWS, SLOTS, BLUEPRINTS = 2, 3, 4

FIELDS = {
    "int64 [R]": (
        "epoch max_epochs plateau_epochs params host_params budget last_op flops host_flops "
        "param_limit flop_limit train_samples samples_per_epoch num_classes "
        "compute_budget compute_spent"
    ),
    "float32 [R]": (
        "val_loss val_score best_loss best_score twin_score train_loss rate_factor learning_rate "
        "chance_loss"
    ),
    "float32 [R, 5]": "loss_history score_history",
    "bool [R]": "stabilized last_success rolled_back",
    "bool [R, S]": "enabled occupied vanishing exploding",
    "int64 [R, S]": (
        "stage blueprint alpha_mode algorithm epochs_in_stage age counterfactual_age slot_params "
        "slot_flops slot_channels slot_positions slot_topology copies"
    ),
    "float32 [R, S]": (
        "alpha alpha_target alpha_velocity time_to_target contribution contribution_se "
        "contribution_velocity grad_norm grad_health grad_health_prev"
    ),
    "float32 [R, S, S]": "interaction",
    "int64 [R, S, B]": "seed_params seed_flops",
}


def documented() -> dict[str, str]:
    """The sentence under each field, as it stands in the source."""
    (definition,) = (
        node
        for node in ast.parse(inspect.getsource(signals)).body
        if isinstance(node, ast.ClassDef) and node.name == "Signals"
    )
    sentences = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            sentences[field.target.id] = ast.literal_eval(below.value)
    return sentences


def make_signals() -> Signals:
    sizes = {"R": ROWS, "S": SLOTS, "B": BLUEPRINTS}
    values = {}
    for kind, names in FIELDS.items():
        dtype, axes = re.fullmatch(r"(\w+) \[(.*)\]", kind).groups()  # type: ignore[union-attr]
        shape = [sizes.get(axis) or int(axis) for axis in axes.split(", ")]
        for name in names.split():
            values[name] = torch.zeros(shape, dtype=getattr(torch, dtype))
    return Signals(**values)


def test_fields_are_exactly_the_promised_ones() -> None:
    promised = {name for names in FIELDS.values() for name in names.split()}
    assert {field.name for field in dataclasses.fields(Signals)} == promised


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in FIELDS.items() for name in names.split()]
)
def test_every_field_documents_its_type_and_shape(name: str, kind: str) -> None:
    assert documented()[name].startswith(f"{kind}, ")


def test_history_is_as_long_as_documented() -> None:
    assert HISTORY == 5


def test_rows_and_slots() -> None:
    made = make_signals()
    assert (made.rows, made.num_slots) == (ROWS, SLOTS)


def test_to_moves_every_field_and_keeps_types() -> None:
    made = make_signals()
    moved = made.to("meta")
    for field in dataclasses.fields(Signals):
        before, after = getattr(made, field.name), getattr(moved, field.name)
        assert after.device.type == "meta"
        assert after.dtype == before.dtype
        assert after.shape == before.shape


def test_signals_cannot_be_changed_or_misspelt() -> None:
    made = make_signals()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.epoch = torch.zeros(ROWS)  # type: ignore[misc]
    values: dict[str, Tensor] = {
        field.name: getattr(made, field.name) for field in dataclasses.fields(Signals)
    }
    with pytest.raises(TypeError, match="epochs"):
        Signals(**values, epochs=values["epoch"])  # type: ignore[call-arg]
