"""What rl3d asks of vLLM's workers where they are other processes: new weights, and what was drawn.

vLLM mixes :class:`Worker` into its own worker (``worker_extension_cls``) and calls its methods by name; arguments and
results are plain data, so that vLLM's safe serialisation carries them.
"""

from typing import Any

import torch


def pack_embeddings(model: torch.nn.Module) -> None:
    """On a CPU vLLM computes logits from a packed copy of the output projection. Of an embedding that is both it keeps the
    copy of the weights before."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


class Worker:
    """Methods of a worker; ``self`` is vLLM's own."""

    model_runner: Any
    vllm_config: Any

    def rl3d_begin(self) -> None:
        """New weights are coming."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())

    def rl3d_take(self, path: str) -> None:
        """Some of them, whole Hugging Face tensors in a safetensors file; this worker cuts out its shards."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(iter(load_file(path, device="cpu").items()))

    def rl3d_finish(self) -> None:
        """That was all of them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if next(model.parameters()).device.type == "cpu":
                pack_embeddings(model)

    def rl3d_drawn(self, names: list[str]) -> dict[str, dict[int, list[Any]]]:
        """What was drawn for these sequences since it was last asked: position -> row."""
        from rl3d.generation.vllm_draws import DRAWN

        return {name: {at: list(row) for at, row in DRAWN.pop(name, {}).items()} for name in names}
