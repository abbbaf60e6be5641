"""The training loop: three flows, the trainer, checkpoints, metrics and where they go."""
