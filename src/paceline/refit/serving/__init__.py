"""A rollout engine behind OpenAI-compatible routes."""
