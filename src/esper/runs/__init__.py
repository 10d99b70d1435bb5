"""Runs: a run in its folder, recorded, checkpointed, stopped and resumed."""
