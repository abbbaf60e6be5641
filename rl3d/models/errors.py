"""The errors of this room."""


class UnsupportedModelError(ValueError):
    """A model, or a setting of it, that rl3d cannot compute; the message names the field and its value."""


class NotTrainedError(UnsupportedModelError):
    """A model, or a setting of it, that is understood and can be converted, but that rl3d does not compute."""
