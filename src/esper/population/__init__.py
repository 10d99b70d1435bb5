"""Population: trains, validates, ablates and evolves many hosts at once."""
