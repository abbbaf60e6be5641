"""Where every byte lives: ranks, coordinates, parameter specifications and regions. Pure arithmetic."""

from rl3d.layout.cuts import cut_problem, tp_sizes
from rl3d.layout.experts import ExpertGrid, expert_name, split_expert_name
from rl3d.layout.parallel import Coord, GenLayout, GenMesh, LayoutError, Mesh, TrainLayout
from rl3d.layout.regions import Box, Holding, flat_interval, matrix_shape
from rl3d.layout.sharding import ShardLayout, count_layers
from rl3d.layout.shards import Atom, Cell, Shard, itemsize
from rl3d.layout.spec import ParamSpec, Piece
from rl3d.layout.stages import stage_chunks, stage_layers

__all__ = [
    "Atom", "Box", "Cell", "Coord", "ExpertGrid", "GenLayout", "GenMesh", "Holding", "LayoutError", "Mesh", "ParamSpec",
    "Piece", "Shard", "ShardLayout", "TrainLayout", "count_layers", "cut_problem", "expert_name",
    "flat_interval", "itemsize",
    "matrix_shape", "split_expert_name", "stage_chunks", "stage_layers", "tp_sizes",
]  # fmt: skip
