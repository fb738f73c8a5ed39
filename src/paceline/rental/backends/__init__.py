"""Who rents machines: one file or folder per backend, reached by name through the registry."""
