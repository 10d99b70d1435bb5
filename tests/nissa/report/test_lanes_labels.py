from __future__ import annotations

from esper.nissa.report.lanes import Wish, place_labels, text_width


def test_texts_share_a_row_where_they_are_apart() -> None:
    placed, missing = place_labels(
        [Wish("norm", 0, "start"), Wish("norm", 300, "start")], left=0, right=760, rows=2
    )
    assert ([one.row for one in placed], missing) == ([0, 0], 0)


def test_a_text_in_the_way_moves_up_and_remembers_its_place() -> None:
    placed, missing = place_labels(
        [Wish("conv_light", 0, "start"), Wish("norm", 20, "start"), Wish("lora", 40, "start")],
        left=0,
        right=760,
        rows=2,
    )
    assert [(one.row, one.wished) for one in placed] == [(0, 0), (1, 20)]
    assert missing == 1


def test_texts_stay_inside_the_edges() -> None:
    width = text_width("conv_light")
    placed, _ = place_labels(
        [Wish("conv_light", 750, "start"), Wish("conv_light", 10, "end")],
        left=0,
        right=760,
        rows=1,
    )
    assert [(one.x, one.anchor) for one in placed] == [(760, "end"), (0, "start")]
    assert width < 380


def test_taken_room_is_left_free() -> None:
    placed, _ = place_labels([Wish("norm", 50, "start")], left=0, right=760, rows=2, taken=60)
    assert placed[0].row == 1
