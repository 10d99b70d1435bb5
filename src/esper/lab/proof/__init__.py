"""Proof: what controllers are worth, against controls, under one limit for all.

`search` looks for schedules and settings on training members, `prove` plays arms on held-out ones
and says who beats whom with what certainty. The protocol: docs/proof.md.
"""
