"""Depth growth: a network trains with a part of its blocks and wakes the rest as copies of them."""
