"""What DeepSpeed asks of a model-parallel unit, answered from explicit process groups."""

from typing import Any

import torch.distributed as dist

from rl3d.distributed.groups import ModelGroups


class ModelParallelUnit:
    """DeepSpeed's ``mpu`` over :class:`ModelGroups`.

    ``get_model_parallel_rank`` is the tensor-parallel rank on purpose: DeepSpeed counts a parameter that is not
    tensor-parallel in the gradient norm only where this is 0, and every stage has parameters of its own.
    """

    def __init__(self, groups: ModelGroups):
        self._groups = groups

    def get_model_parallel_group(self) -> Any:
        return self._groups.mp

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._groups.mp)

    def get_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_group(self) -> Any:
        return self._groups.tp

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self._groups.tp)[0]

    def get_pipeline_model_parallel_group(self) -> Any:
        return self._groups.pp

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.pp_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.pp_size

    def get_data_parallel_group(self) -> Any:
        return self._groups.dp

    def get_data_parallel_rank(self) -> int:
        return self._groups.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.dp_size
