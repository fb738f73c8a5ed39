"""RunPod: containers in data centres and on other people's hosts."""
