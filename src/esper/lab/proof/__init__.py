"""Comparison of controllers with controls, under the same limits.

`search` finds schedules and settings on training members, `clone` trains a policy on them, and
`prove` compares arms on held-out members with statistics. The protocol: docs/proof.md.
"""
