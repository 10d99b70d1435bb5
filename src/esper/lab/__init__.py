"""The laboratory: tasks, populations, proofs, environments and benchmarks of controllers."""
