"""Families that are only converted: megatron-core loads what the converter wrote and computes logits, at several layouts."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

from rl3d.models import Architecture
from tests.io.megatron_checks import _logits
from tests.io.megatron_models import build
from tests.models.zoo import make


def main(runtime: Any, directory: str, names: list[str], layouts: list[tuple[int, int, int]], padded: int,
         tokens: list[int]) -> dict[str, Any]:  # fmt: skip
    """Writes logits of ``tokens`` as ``NAME-TP-PP-EP.pt`` and, at tp 2 and ep 2, what megatron-core saves again."""
    root = Path(directory)
    for tp, pp, ep in layouts:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.get_cuda_rng_tracker().add("model-parallel-rng", 1)
        tensor_parallel.get_cuda_rng_tracker().add("expert-parallel-rng", 2)
        for name in names:
            arch = Architecture.from_hf(root / name, convert_only=True)
            if ep > 1 and arch.experts is None:
                continue
            model = build(arch, make(name), padded, tp, pp, ep)
            for value in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("expert_bias"))]:
                value.data.fill_(float("nan"))
            wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
            loaded = dist_checkpointing.load(wanted, str(root / f"{name}.megatron"))
            missing, extra = model.load_state_dict(loaded, strict=False)
            assert not extra and not [k for k in missing if "_extra_state" not in k], (missing, extra)
            logits = _logits(model, torch.tensor([tokens]), pp)
            if logits is not None and runtime.rank in (0, runtime.world_size - 1):
                if arch.logit_softcap:
                    logits = arch.logit_softcap * torch.tanh(logits / arch.logit_softcap)
                if parallel_state.get_tensor_model_parallel_rank() == 0:
                    torch.save(logits[0, :, : arch.vocab_size], root / f"{name}-{tp}-{pp}-{ep}.pt")
            if 2 in (tp, ep):
                out = root / f"{name}-{tp}-{ep}.saved"
                out.mkdir(exist_ok=True)
                torch.distributed.barrier()
                dist_checkpointing.save(model.sharded_state_dict(), str(out))
    torch.distributed.barrier()
    return {}
