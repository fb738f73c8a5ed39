"""A rollout engine in an SGLang server beside us, driven through its public HTTP routes."""
