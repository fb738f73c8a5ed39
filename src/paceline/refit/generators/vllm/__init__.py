"""vLLM as a rollout engine: a weight-transfer backend inside its workers, and what drives it."""
