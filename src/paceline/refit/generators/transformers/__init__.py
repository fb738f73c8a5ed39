"""A rollout engine on Hugging Face transformers, with a generation loop of its own."""
