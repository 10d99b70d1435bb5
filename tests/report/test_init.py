from __future__ import annotations

import esper.report


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(esper.report.__all__) == esper.report.__all__
    for name in esper.report.__all__:
        assert getattr(esper.report, name).__doc__
