from __future__ import annotations

import subprocess
import sys

import esper.nissa


def test_public_names_exist_and_are_sorted() -> None:
    constants = [name for name in esper.nissa.__all__ if name.isupper()]
    others = [name for name in esper.nissa.__all__ if not name.isupper()]
    assert esper.nissa.__all__ == sorted(constants) + sorted(others)
    for name in others:
        assert getattr(esper.nissa, name).__doc__


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    script = (
        "import sys, types\n"
        # The top-level package may load what it likes; here it is about this one.
        "package = types.ModuleType('esper'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['esper'] = package\n"
        "import esper.nissa\n"
        "heavy = {'tensorboardX', 'wandb', 'polars', 'pandas', 'yaml', 'rich', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    import esper

    done = subprocess.run(
        [sys.executable, "-c", script, esper.__path__[0]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
