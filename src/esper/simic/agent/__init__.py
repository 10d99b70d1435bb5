"""The learner: advantages, the rollout buffer and PPO."""
