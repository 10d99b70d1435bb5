from __future__ import annotations

from esper.nissa.report.page import MOST_ROWS, Column, flatten, render_pairs, render_table


def test_cells_are_escaped_and_columns_keep_their_kind() -> None:
    table = render_table("a<b", [Column("<x>"), Column("n", "number")], [("<i>", 3)], noun="row")
    assert "<caption>a&lt;b</caption>" in table
    assert '<th scope="col">&lt;x&gt;</th><th scope="col" class="number">n</th>' in table
    assert '<td>&lt;i&gt;</td><td class="number">3</td>' in table


def test_tables_are_bounded_and_say_so() -> None:
    pairs = [(str(index), index) for index in range(MOST_ROWS + 1)]
    table = render_pairs("Settings", pairs, noun="setting")
    assert table.count("<tr>") == MOST_ROWS
    assert "And 1 more setting not shown here." in table


def test_settings_are_flattened_to_dotted_names() -> None:
    config = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": None}], "g": (), "h": True}
    assert dict(flatten(config)) == {
        "a.b": 1,
        "a.c": {},
        "d": "1, 2",
        "e[0].f": "none",
        "g": "none",
        "h": True,
    }
