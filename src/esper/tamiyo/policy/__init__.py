"""What a policy sees and may do: Observation V3, its normalisation, masks and distributions."""
