"""What happened, told to people and machines: events, logs, metrics."""
