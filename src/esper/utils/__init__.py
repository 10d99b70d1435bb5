"""Tools that are no contract: files, locks, storage, settings, processes, randomness."""
