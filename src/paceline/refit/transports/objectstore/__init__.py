"""Buckets: S3, GCS, Azure and folders, where nobody needs a port that others can reach."""
