from __future__ import annotations

from esper.nissa.report.markup import Label, place_labels, text_width

FONT = 23.0


def test_texts_share_a_row_where_they_are_apart() -> None:
    placed, missing = place_labels(
        [Label("norm", 0), Label("norm", 300)], left=0, right=760, rows=2, font=FONT
    )
    assert ([one.row for one in placed], missing) == ([0, 0], 0)


def test_a_text_in_the_way_moves_up_and_remembers_its_place() -> None:
    placed, missing = place_labels(
        [Label("conv_light", 0), Label("norm", 20), Label("lora", 40)],
        left=0,
        right=760,
        rows=2,
        font=FONT,
    )
    assert [(one.row, one.wanted) for one in placed] == [(0, 0), (1, 20)]
    assert missing == 1


def test_texts_stay_inside_the_edges() -> None:
    width = text_width("conv_light", FONT)
    placed, _ = place_labels(
        [Label("conv_light", 750), Label("conv_light", 10, "end")],
        left=0,
        right=760,
        rows=1,
        font=FONT,
    )
    assert [(one.x, one.anchor) for one in placed] == [(760, "end"), (0, "start")]
    assert width < 380


def test_taken_room_is_left_free() -> None:
    placed, _ = place_labels([Label("norm", 50)], left=0, right=760, rows=2, font=FONT, taken=60)
    assert placed[0].row == 1
