"""Rewards: composable terms and the modes made of them."""
