from __future__ import annotations

from dataclasses import replace

import torch

from esper.lab.proof.results import ablation_flops, training_flops
from esper.leyline.stages import SeedStage
from esper.testing.controllers import random_signals

BLENDING, FOSSIL, TRAINING = SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.TRAINING


def test_costs_by_hand() -> None:
    drawn, _ = random_signals(4, 3, torch.Generator().manual_seed(0))
    signals = replace(
        drawn,
        host_flops=torch.tensor([100] * 4),
        flops=torch.tensor([100, 150, 170, 130]),
        samples_per_epoch=torch.tensor([10] * 4),
        compute_budget=torch.tensor([-1] * 4),
        slot_flops=torch.tensor([[0, 0, 0], [50, 0, 0], [50, 20, 0], [20, 10, 0]]),
        stage=torch.tensor(
            [[-1, -1, -1], [BLENDING, -1, -1], [BLENDING, BLENDING, -1], [FOSSIL, TRAINING, -1]]
        ),
        alpha=torch.tensor([[0.0] * 3, [0.5, 0, 0], [1.0, 0.3, 0], [1.0, 0, 0]]),
    )
    before = torch.tensor([0.0, 100.0, 0.0, 0.0], dtype=torch.float64)
    assert training_flops(signals, before).tolist() == [3000, 4600, 5100, 3900]
    budget, spent = torch.tensor([-1, 900, -1, -1]), torch.tensor([0, 700, 0, 0])
    limited = replace(signals, compute_budget=budget, compute_spent=spent)
    assert training_flops(limited, before).tolist() == [3000, 700, 5100, 3900]
    # One seed: off (100). Two: the first alone (150), the second alone (120), neither (100).
    # A fossil and a seed in isolation are not ablated.
    samples = torch.tensor([7, 7, 2, 7])
    assert ablation_flops(signals, samples).tolist() == [0, 700, 740, 0]
