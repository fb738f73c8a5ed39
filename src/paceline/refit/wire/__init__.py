"""Protobuf messages of the control plane and their translation; they stop at control."""
