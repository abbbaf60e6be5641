"""Prompts: where they come from, how they become tokens, and how samples are packed into rows."""
