"""The error of this room."""


class UnsupportedModelError(ValueError):
    """A model, or a setting of it, that rl3d cannot compute; the message names the field and its value."""
