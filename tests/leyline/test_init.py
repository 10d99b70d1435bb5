import esper.leyline

PROMISED = (
    *("SeedStage", "LifecycleOp", "SlotConfig", "Signals", "HEAD_NAMES", "HEAD_SIZES"),
    *("NUM_OPS", "NUM_STAGES", "NUM_BLUEPRINTS"),
    *("DEFAULT_LSTM_HIDDEN_DIM", "DEFAULT_FEATURE_DIM", "DEFAULT_GAMMA"),
    *("ENTROPY_COEF_PER_HEAD", "ENTROPY_FLOOR_PER_HEAD", "ENTROPY_FLOOR_PENALTY_COEF"),
    "PROBABILITY_FLOOR_PER_HEAD",
)


def test_promised_names_are_there() -> None:
    assert set(PROMISED) == set(esper.leyline.__all__)


def test_all_is_sorted_without_repeats_and_every_name_exists() -> None:
    names = esper.leyline.__all__
    # Constants, classes, functions: the order the linter keeps.
    kinds = [0 if name.isupper() else 1 if name[0].isupper() else 2 for name in names]
    assert sorted(zip(kinds, names, strict=True)) == list(zip(kinds, names, strict=True))
    assert len(set(names)) == len(names)
    assert all(hasattr(esper.leyline, name) for name in names)
