"""Advantages, losses, KL estimators and loss weights: pure functions on tensors, no processes, no models."""
