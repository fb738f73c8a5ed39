"""Hooks for the training loops people already have."""
