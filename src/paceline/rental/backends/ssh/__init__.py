"""Your own hosts, one machine at a time on each, reached by ssh."""
