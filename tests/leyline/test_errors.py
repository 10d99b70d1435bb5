import pickle

import pytest

from esper.leyline import errors
from esper.leyline.errors import EsperError, UnknownNameError, nearest, unknown_name

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
    assert nearest("conv_ligth", []) == ""


def test_nearest_takes_what_is_no_text() -> None:
    assert nearest(12, ["conv_light"]) == ""  # type: ignore[arg-type]


def test_unknown_name_says_what_is_close_and_what_is_known() -> None:
    error = unknown_name("blueprint", "nrom", ["norm", "attention"])
    assert isinstance(error, UnknownNameError)
    assert str(error) == ("unknown blueprint 'nrom', did you mean 'norm'? known: attention, norm")
    assert str(unknown_name("task", "zzz", ["a"])) == "unknown task 'zzz'; known: a"
    assert str(unknown_name("task", "zzz", [])) == "unknown task 'zzz'; known: none"
