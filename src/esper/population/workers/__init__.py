"""The workers strategy: CPU processes with one thread each, each running a slice of the rows."""
