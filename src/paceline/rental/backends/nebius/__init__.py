"""Nebius AI Cloud: virtual machines in its own regions, over gRPC."""
