"""Growth: one model grown in its owner's loop, or from beginning to end in one call."""
