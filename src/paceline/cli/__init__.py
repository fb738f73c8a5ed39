"""The command line: one function per verb, heavy imports inside them."""
