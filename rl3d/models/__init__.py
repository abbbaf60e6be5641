"""Model families as data, and megatron-core modules built from them."""

from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError
from rl3d.models.families import FAMILIES, MappedParameter, Segment, hf_shapes, mapped_parameters, parameter_specs

__all__ = [
    "FAMILIES", "Architecture", "MappedParameter", "Segment", "UnsupportedModelError", "hf_shapes",
    "mapped_parameters", "parameter_specs",
]  # fmt: skip
