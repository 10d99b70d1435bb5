"""Measurements behind the project's figures; each file is one command and prints one table."""
