"""Discover, lease, plan, fetch, verify, apply, report, release: an engine follows its run."""
