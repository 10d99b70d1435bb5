"""Where a model can grow: slots found, probed, suggested and checked."""
