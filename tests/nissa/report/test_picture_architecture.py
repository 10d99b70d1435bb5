from __future__ import annotations

from esper.leyline.records import ModuleRecord
from esper.nissa.report.picture import MOST_BOXES, describe_architecture, draw_architecture
from tests.nissa.report.reading import having, parse, told, written
from tests.nissa.report.runs import make_slot

HOSTILE = "</svg><script>\x1b[31m\u202e" + "W" * 300


def part(path: str, *slots: str, parameters: int = 10) -> ModuleRecord:
    return ModuleRecord(
        path=path, kind="Linear", parameters=parameters, shape=(4, 8), slots=tuple(slots)
    )


MODULES = (part("stem", "a"), part("pool", parameters=0), part("body", "b", "c"), part("head"))
SLOTS = (
    make_slot("a", stage="FOSSILIZED", blueprint="norm", alpha=0.7, parameters=1810),
    make_slot("b", stage="EMBARGOED", blueprint="lora"),
    make_slot("c"),
)


def test_the_host_is_a_chain_with_its_slots_beside_it() -> None:
    picture = parse(draw_architecture(MODULES, SLOTS, is_file=True))
    texts = written(picture)
    for text in ("stem", "body", "head", "Linear → 4 × 8", "10 parameters"):
        assert text in texts
    assert "pool" not in texts
    assert "a: norm" in texts
    assert "fossilized, alpha 0.70" in texts
    assert "1,810 parameters" in texts
    assert "b: empty" in texts
    assert "cooling down" in texts
    assert "c: empty" in texts
    assert len(having(picture, "arrow")) == 2
    assert len(having(picture, "part", "seed")) == 2
    assert len(having(picture, "part", "empty")) == 1
    assert "slot a, norm, fossilized, alpha 0.70, 1,810 parameters" in told(picture)


def test_words_say_what_the_drawing_shows() -> None:
    words = describe_architecture(MODULES, SLOTS)
    assert "A host of 3 modules with 30 parameters" in words
    assert "slot a norm fossilized, alpha 0.70 1,810 parameters" in words
    assert "slot c empty" in words


def test_a_long_chain_keeps_its_ends_and_its_slots() -> None:
    modules = [part(f"layer{number}", *(["s"] if number == 500 else [])) for number in range(1000)]
    picture = draw_architecture(modules, (), is_file=True)
    texts = written(parse(picture))
    for name in ("layer0", "layer500", "layer999", "s: empty"):
        assert name in texts
    assert sum("not drawn" in text for text in texts) == 2
    assert len(having(parse(picture), "arrow")) <= MOST_BOXES + 2
    every = [part(f"layer{number}", f"s{number}") for number in range(1000)]
    assert len(draw_architecture(every, (), is_file=True)) < 200_000


def test_hostile_names_stay_text() -> None:
    slot = make_slot(HOSTILE, stage="HOLDING", blueprint=HOSTILE)
    picture = draw_architecture([part(HOSTILE, HOSTILE)], [slot], is_file=True)
    parse(picture)
    assert "<script" not in picture
    assert "\x1b" not in picture
    assert max(map(len, written(parse(picture)))) < 60


def test_nothing_at_all_is_drawn_as_nothing() -> None:
    parse(draw_architecture((), (), is_file=True))
