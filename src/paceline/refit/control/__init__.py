"""Who may read which weight version, until when."""
