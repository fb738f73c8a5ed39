"""Rollout engines: where verified bytes become live parameters."""
