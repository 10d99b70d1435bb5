"""The one place where the version of Esper is written."""

__version__ = "0.2.0"
