"""The one place where the version of Esper is written."""

__version__ = "0.1.0"
