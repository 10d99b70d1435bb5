from __future__ import annotations

import esper.nissa.report


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(esper.nissa.report.__all__) == esper.nissa.report.__all__
    for name in esper.nissa.report.__all__:
        assert getattr(esper.nissa.report, name).__doc__
