"""The training loop: rollouts of whole populations, updates, checkpoints."""
