from __future__ import annotations

import esper.nissa.monitors


def test_public_names_exist() -> None:
    for name in esper.nissa.monitors.__all__:
        assert hasattr(esper.nissa.monitors, name)
    assert len(esper.nissa.monitors.MONITORS) > 25
