"""Trainer engines: how the weights of a training library become immutable source bytes."""
