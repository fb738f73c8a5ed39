"""One abstract test class per port; an implementation is right when it passes."""
