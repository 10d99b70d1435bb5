import pytest

from esper.leyline import stages
from esper.leyline.stages import NUM_STAGES, STAGE_INDEX, TRANSITIONS, SeedStage, parse_stage


def test_values_are_the_documents() -> None:
    assert {stage.name: stage.value for stage in SeedStage} == {
        "UNKNOWN": 0,
        "DORMANT": 1,
        "GERMINATED": 2,
        "TRAINING": 3,
        "BLENDING": 4,
        "HOLDING": 6,
        "FOSSILIZED": 7,
        "PRUNED": 8,
        "EMBARGOED": 9,
        "RESETTING": 10,
    }
    assert NUM_STAGES == 10


def test_positions_have_no_gap_although_values_do() -> None:
    assert STAGE_INDEX == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 7: 6, 8: 7, 9: 8, 10: 9}


def test_transitions_are_the_documents() -> None:
    plain = {int(source): sorted(map(int, targets)) for source, targets in TRANSITIONS.items()}
    assert plain == {
        0: [1],
        1: [2],
        2: [3, 8],
        3: [4, 8],
        4: [6, 8],
        6: [4, 7, 8],
        7: [],
        8: [9],
        9: [10],
        10: [1],
    }


def test_every_stage_is_empty_with_module_or_cooling() -> None:
    groups = (stages.EMPTY_STAGES, stages.MODULE_STAGES, stages.COOLDOWN_STAGES)
    members = [stage for group in groups for stage in group]
    assert sorted(members) == sorted(SeedStage)


def test_groups_follow_from_the_transitions() -> None:
    prunable = {stage for stage in SeedStage if SeedStage.PRUNED in TRANSITIONS[stage]}
    assert set(stages.LIVE_STAGES) == prunable
    assert set(stages.MODULE_STAGES) == prunable | {SeedStage.FOSSILIZED}
    assert set(stages.BLENDED_STAGES) == {
        SeedStage.BLENDING,
        SeedStage.HOLDING,
        SeedStage.FOSSILIZED,
    }
    assert set(stages.DEVELOPING_STAGES) == {
        SeedStage.GERMINATED,
        SeedStage.TRAINING,
        SeedStage.PRUNED,
        SeedStage.EMBARGOED,
        SeedStage.RESETTING,
    }


@pytest.mark.parametrize("stage", SeedStage)
def test_parse_stage_knows_every_stage(stage: SeedStage) -> None:
    assert parse_stage(int(stage)) is stage


@pytest.mark.parametrize("value", [5, -1, 11])
def test_parse_stage_refuses_the_retired_value_and_strangers(value: int) -> None:
    with pytest.raises(ValueError, match=rf"value {value} .*5 is retired.*6 HOLDING"):
        parse_stage(value)
