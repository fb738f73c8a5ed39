"""Lambda Cloud: virtual machines with fixed types, in its own regions."""
