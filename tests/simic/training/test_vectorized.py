from __future__ import annotations

from esper.simic.training import rollout, trainer, vectorized


def test_the_documents_name_leads_to_the_rollout_and_the_training_loop() -> None:
    assert vectorized.Rollout is rollout.Rollout
    assert vectorized.Trainer is trainer.Trainer
