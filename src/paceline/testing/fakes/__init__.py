"""Stand-ins that behave."""
