"""Conformance batteries: what every plug-in must satisfy, for third parties to run on theirs."""
