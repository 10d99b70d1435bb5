"""Kasmina: the morphology — hosts, slots, seeds, their lifecycle and how they are mixed in."""
