"""Records of both halves behind one protocol; the composition root picks implementations."""
