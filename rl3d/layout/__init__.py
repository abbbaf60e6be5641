"""Where every byte lives: ranks, coordinates, parameter specifications and regions. Pure arithmetic."""

from rl3d.layout.parallel import Coord, GenLayout, GenMesh, LayoutError, Mesh, TrainLayout, stage_layers
from rl3d.layout.spec import ParamSpec, Piece

__all__ = ["Coord", "GenLayout", "GenMesh", "LayoutError", "Mesh", "ParamSpec", "Piece", "TrainLayout", "stage_layers"]
