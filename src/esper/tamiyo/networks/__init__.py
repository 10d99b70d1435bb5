"""The policy network: from an observation to a distribution over actions, and a value."""
