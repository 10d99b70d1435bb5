from esper.leyline.stages import (
    ALPHA_TARGETS,
    SPEED_TICKS,
    STEEPNESS,
    STYLE_SPECS,
    TEMPO_EPOCHS,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    BlendStyle,
)


def test_orders_are_those_the_observation_encodes() -> None:
    assert [mode.name for mode in AlphaMode] == ["HOLD", "UP", "DOWN"]
    assert [algorithm.name for algorithm in AlphaAlgorithm] == ["ADD", "MULTIPLY", "GATE"]
    for enum in (AlphaMode, AlphaAlgorithm, AlphaCurve, BlendStyle):
        assert [int(member) for member in enum] == list(range(len(enum)))


def test_choices_are_the_documents() -> None:
    assert TEMPO_EPOCHS == (3, 5, 8)
    assert ALPHA_TARGETS == (0.5, 0.7, 1.0)
    assert SPEED_TICKS == (0, 3, 5, 8)


def test_steepness_of_every_curve() -> None:
    assert {curve.name: STEEPNESS[curve] for curve in AlphaCurve} == {
        "LINEAR": 0.0,
        "COSINE": 0.0,
        "SIGMOID_GENTLE": 6.0,
        "SIGMOID": 12.0,
        "SIGMOID_SHARP": 24.0,
    }


def test_every_style_names_an_algorithm_and_a_first_ramp() -> None:
    plain = {
        style.name: (STYLE_SPECS[style].algorithm.name, STYLE_SPECS[style].curve.name)
        for style in BlendStyle
    }
    assert plain == {
        "LINEAR_ADD": ("ADD", "LINEAR"),
        "LINEAR_MULTIPLY": ("MULTIPLY", "LINEAR"),
        "SIGMOID_ADD": ("ADD", "SIGMOID"),
        "GATED_GATE": ("GATE", "LINEAR"),
    }
