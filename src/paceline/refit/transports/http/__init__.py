"""Manifests and payload objects over HTTP/1.1 with ranges."""
