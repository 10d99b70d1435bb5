import math

import torch

from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.reports import plain_reports
from esper.testing.signals import random_signals


def test_records_say_what_the_tensors_say() -> None:
    signals, _ = random_signals(40, 3, torch.Generator().manual_seed(1))
    config = SlotConfig.of(5)
    hosts, slots = plain_reports(signals, config)
    assert len(hosts) == len(slots) == 40
    for row, (host, reports) in enumerate(zip(hosts, slots, strict=True)):
        assert host.epoch == int(signals.epoch[row])
        assert host.val_loss == float(signals.val_loss[row])
        known = int((~signals.loss_history[row].isnan()).sum())
        assert len(host.loss_history) == len(host.score_history) == known == min(host.epoch, 5)
        enabled = [name for i, name in enumerate(config.slot_ids[:3]) if signals.enabled[row, i]]
        assert list(host.enabled or ()) == enabled
        for index, name in enumerate(config.slot_ids[:3]):
            assert (name in reports) == bool(signals.occupied[row, index])
            if name not in reports:
                continue
            report = reports[name]
            assert report.stage == int(signals.stage[row, index])
            assert report.alpha == float(signals.alpha[row, index])
            contribution = float(signals.contribution[row, index])
            assert report.is_measured == (not math.isnan(contribution))
            assert (report.counterfactual_age is not None) == report.is_measured
            assert set(report.interactions or {}) == set(config.slot_ids[:3]) - {name}
