"""Reward functions, and scoring samples with them while sampling still runs."""
