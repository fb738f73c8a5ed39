"""Fast loops of the delta codec, equal to the numpy reference by test."""
