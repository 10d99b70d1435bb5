import pickle

import pytest
import torch
from torch import nn

from esper.leyline import errors
from esper.leyline.errors import (
    EsperError,
    MissingExtraError,
    UnknownNameError,
    as_command,
    describe_exception,
    instead,
    nearest,
    nearest_few,
    needing,
    option,
    reason_of,
    unknown_name,
)

BUILTIN_PARENT = {
    "UsageError": ValueError,
    "ConfigError": ValueError,
    "UnknownNameError": KeyError,
    "MissingExtraError": ImportError,
    "SlotError": ValueError,
    "DataError": OSError,
    "CheckpointError": OSError,
    "NonFiniteError": ArithmeticError,
    "OwnCodeError": RuntimeError,
    "EmptyMaskError": ValueError,
}


def all_errors() -> list[type[EsperError]]:
    return [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, EsperError) and item is not EsperError
    ]


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_every_error_is_also_the_builtin_a_caller_expects(error: type[EsperError]) -> None:
    assert issubclass(error, BUILTIN_PARENT[error.__name__])


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_message_is_shown_as_written_and_survives_a_worker_process(
    error: type[EsperError],
) -> None:
    raised = error("'x' is wrong; use 'y'")
    assert str(raised) == "'x' is wrong; use 'y'"
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert str(copy) == str(raised)


def test_nearest_suggests_only_what_is_close() -> None:
    assert nearest("conv_ligth", ["conv_light", "norm"]) == ", did you mean 'conv_light'?"
    assert nearest("zzz", ["conv_light", "norm"]) == ""
    assert nearest("foo", ["noop", "norm"]) == ""
    assert nearest("conv_ligth", []) == ""


def test_nearest_takes_what_is_no_text() -> None:
    assert nearest(12, ["conv_light"]) == ""  # type: ignore[arg-type]


def test_unknown_name_says_what_is_close_and_what_is_known() -> None:
    error = unknown_name("blueprint", "nrom", ["norm", "attention"])
    assert isinstance(error, UnknownNameError)
    assert str(error) == ("unknown blueprint 'nrom', did you mean 'norm'? known: attention, norm")
    assert str(unknown_name("task", "zzz", ["a"])) == "unknown task 'zzz'; known: a"
    assert str(unknown_name("task", "zzz", [])) == "unknown task 'zzz'; known: none"


def test_what_to_say_instead_keeps_the_order_and_ends_somewhere() -> None:
    assert instead("zzz", ["b", "a"], "slots:") == "; slots: b, a"
    assert instead("zzz", []) == "; known: none"
    assert instead(3, map(str, range(99))).endswith("48, 49, …")


def test_a_reason_is_one_line() -> None:
    assert reason_of(ValueError("two\n  lines")) == "two lines"
    assert reason_of(ValueError()) == "ValueError"


def test_a_missing_extra_is_named() -> None:
    told = (
        r"a page needs the extra: pip install 'esper-grow\[report\]' \(No module named 'nowhere'\)"
    )
    with pytest.raises(MissingExtraError, match=told), needing("a page", "report"):
        import nowhere  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("own", [torch.float64, torch.float16, torch.bfloat16])
def test_advice_about_types_names_the_type_of_the_weights(
    own: torch.dtype, kind: str, bias: bool
) -> None:
    layer = nn.Linear(4, 2, bias=bias) if kind == "linear" else nn.Conv1d(4, 2, 1, bias=bias)
    with pytest.raises(RuntimeError) as raised:
        layer.to(own)(torch.zeros(3, 4) if kind == "linear" else torch.zeros(3, 4, 5))
    told = describe_exception(raised.value)
    if "expected scalar type" in told:  # It does not say which of both is that of the weights.
        assert told.endswith(
            "; weights and inputs must have the same type: give inputs as "
            "x.to(next(model.parameters()).dtype), or convert the model, as by model.float()"
        )
        return
    assert told.endswith(
        f"; the weights are {own} and the inputs torch.float32: give inputs as x.to({own}), or "
        "convert the model by model.to(torch.float32)"
    )


def test_advice_about_whole_numbers_names_the_type_of_the_weights() -> None:
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(4, 2)(torch.zeros(3, 4, dtype=torch.int64))
    assert describe_exception(raised.value).endswith("own type, as by x.to(torch.float32)")


def test_options_are_written_as_the_user_writes_them() -> None:
    names = ("resume", "overwrite", "out")
    assert [option(name) for name in names] == ["resume=True", "overwrite=True", "out=..."]
    with as_command():
        assert [option(name) for name in names] == ["--resume", "--overwrite", "--out"]
    assert option("resume") == "resume=True"


def test_of_many_names_only_the_closest_are_shown() -> None:
    names = [f"{block}.{part}" for block in range(3) for part in ("norm", "linear1", "linear2")]
    assert nearest_few("x", names[:8]) == ", ".join(names[:8])
    assert nearest_few("1.linear", names).endswith(" and 5 more")
    assert nearest_few("1.linear", names).startswith("1.linear")
    assert nearest_few("??", names) == "0.norm, 0.linear1, 0.linear2, 1.norm and 5 more"
    assert nearest_few("x", []) == "none"
