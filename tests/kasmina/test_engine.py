from __future__ import annotations

from pathlib import Path

import torch

from esper.kasmina.engine import Moments, RowWeights, empty_sample
from esper.utils.storage import load_tree, save_tree
from tests.plots import same


def test_a_row_survives_being_written_down(tmp_path: Path) -> None:
    row = RowWeights(
        host={"a.weight": torch.randn(2, 3)},
        host_moments=Moments(
            {"a.weight": torch.ones(2, 3)}, {"a.weight": torch.ones(2, 3)}, {"a.weight": 7}
        ),
        seeds={2: {"seed.w": torch.ones(2), "gate.w": torch.ones(1)}, 0: {}},
        seed_moments={
            2: Moments({"seed.w": torch.zeros(2), "gate.w": torch.zeros(1)}),
            0: Moments(),
        },
        host_buffers={"norm.count": torch.tensor(3)},
        seed_buffers={2: {"b": torch.ones(1)}},
        germinations=4,
    )
    save_tree(tmp_path / "row", row.to_tree(), kind="row", version=1)
    tree, _ = load_tree(tmp_path / "row", kind="row", version=1)
    again = RowWeights.from_tree(tree)
    assert again.to_tree().keys() == set(RowWeights.__slots__)
    assert same(again.to_tree(), row.to_tree())
    assert again.host_moments.steps == {"a.weight": 7}
    assert again.seed_moments[0].are_at_rest


def test_nothing_was_sampled() -> None:
    sample, sampled = empty_sample(2, 3)
    assert not bool(sampled.any())
    assert bool((sample.health == 1).all())
    assert sample.norm.shape == (2, 3)
