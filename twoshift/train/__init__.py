"""Source models, adapters and their checkpoints."""
