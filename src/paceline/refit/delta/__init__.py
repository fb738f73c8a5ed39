"""The change between two weight versions: encode, apply, invert, compose over plain buffers."""
