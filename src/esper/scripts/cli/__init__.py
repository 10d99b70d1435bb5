"""The `esper` command, one file per verb."""
