from __future__ import annotations

import sys

import pytest

from esper.lab.population.ray_population import RayCluster
from esper.leyline.errors import UsageError
from esper.scripts.cli.main import main


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'esper-grow\[ray\]'"):
        RayCluster()


def test_options_of_a_cluster_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "smoke", "--actors", "2", "--out", "nowhere"]) == 2
    assert "--actors is for a Ray cluster; add --engine ray" in capsys.readouterr().err
