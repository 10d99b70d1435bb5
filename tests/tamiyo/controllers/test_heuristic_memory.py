from __future__ import annotations

from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.heuristic_memory import RowMemory, read_rows
from tests.tamiyo.controllers.scenes import Scene, Slot


def observe(memory: RowMemory, score: float, stage: SeedStage) -> None:
    scene = Scene(slots=[Slot(stage=stage)], score=score)
    memory.observe(read_rows(scene.signals(), scene.masks())[0])


def test_baselines_are_the_scores_at_the_decisions_that_began_them() -> None:
    memory = RowMemory()
    observe(memory, 50.0, SeedStage.DORMANT)
    assert memory.seeds == {}
    observe(memory, 51.0, SeedStage.GERMINATED)
    observe(memory, 52.0, SeedStage.TRAINING)
    observe(memory, 53.0, SeedStage.TRAINING)
    seed = memory.seeds[0]
    assert (seed.germination_score, seed.stage_score) == (50.0, 51.0)
    observe(memory, 54.0, SeedStage.BLENDING)
    assert (seed.germination_score, seed.stage_score) == (50.0, 53.0)
    observe(memory, 55.0, SeedStage.FOSSILIZED)
    assert memory.seeds == {}


def test_a_seed_seen_first_is_measured_from_then_on() -> None:
    memory = RowMemory()
    observe(memory, 50.0, SeedStage.BLENDING)
    assert memory.seeds[0].germination_score == 50.0


def test_plain_data_comes_back() -> None:
    memory = RowMemory(last_prune=3, position=2, penalised_turns=1, penalties={4: 0.5})
    observe(memory, 50.0, SeedStage.BLENDING)
    assert RowMemory.from_plain(memory.to_plain()) == memory
    assert RowMemory.from_plain(RowMemory().to_plain()) == RowMemory()
