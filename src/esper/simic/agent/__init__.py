"""The learner: advantages, rollout buffer, PPO."""
