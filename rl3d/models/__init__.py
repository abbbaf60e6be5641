"""Model families as data, and megatron-core modules built from them."""

from rl3d.models.architecture import Architecture
from rl3d.models.errors import NotTrainedError, UnsupportedModelError
from rl3d.models.families import FAMILIES
from rl3d.models.hf_config import trained_families
from rl3d.models.mapping import Fused, MappedParameter, fused_tensors, hf_shapes, mapped_parameters, parameter_specs
from rl3d.models.rules import Segment

__all__ = [
    "FAMILIES", "Architecture", "Fused", "MappedParameter", "NotTrainedError", "Segment", "UnsupportedModelError",
    "fused_tensors", "hf_shapes", "mapped_parameters", "parameter_specs", "trained_families",
]  # fmt: skip
