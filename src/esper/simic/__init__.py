"""Simic: how a controller learns. Rewards, the PPO agent, and the training loop around them."""
