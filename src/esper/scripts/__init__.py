"""Entry points that are run with `python -m esper.scripts.NAME`; thin, and imported by nothing."""
