"""Where the two halves meet: one job, its machines and its weights."""
