"""Adapters: low-rank changes of a frozen model's weights, placed and sized while they train."""
