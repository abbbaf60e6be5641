"""One conversion in a process of its own, and what it took: python -m rl3d.bench.convert_once WORK SRC DST [KEY=VALUE ...].

Memory is anonymous memory (RssAnon of /proc/self/status), what a process cannot give back to the page cache, above what it
was once everything was imported. The kernel keeps that number; adding it up anew from the page tables (smaps_rollup) every
few milliseconds would hold up the page faults of what is measured, and double its time.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def anonymous_bytes() -> int:
    """Anonymous memory of this process now, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status says nothing about anonymous memory (RssAnon)")


class Watch:
    """Samples anonymous memory in a thread; ``peak`` is what it rose by, in bytes."""

    def __init__(self) -> None:
        self.peak, self._base, self._end = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes() - self._base)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()


def copy(src: str, dst: str) -> None:
    """The disk's own speed: the files of a directory, copied and flushed."""
    import os

    Path(dst).mkdir()
    for file in sorted(p for p in Path(src).iterdir() if p.is_file()):
        shutil.copyfile(file, Path(dst) / file.name)
        with (Path(dst) / file.name).open("rb") as handle:
            os.fsync(handle.fileno())


def through_transformers(src: str, dst: str) -> None:
    """What reading and writing a whole model costs."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
    model.save_pretrained(dst)


def through_bridge(src: str, dst: str) -> None:
    """Megatron-Bridge's way from Hugging Face files to a Megatron checkpoint.

    Without a GPU its own ``import_ckpt`` cannot run (it asks for the state of CUDA's generators), so the model is filled by
    Megatron-Bridge and saved by megatron-core's ``dist_checkpointing``, which ``import_ckpt`` ends in as well.
    """
    import torch
    from megatron.bridge import AutoBridge  # type: ignore[import-not-found]

    if torch.cuda.is_available():
        AutoBridge.import_ckpt(src, dst)
        return
    from megatron.core import dist_checkpointing

    cuda: Any = torch.cuda  # whose writer takes a GPU for granted, to wait for and to put its one flag on
    cuda.synchronize, cuda.current_device = lambda *_: None, lambda: "cpu"
    (model,) = bridge_model(src)
    Path(dst).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), dst)


def bridge_model(src: str) -> list[Any]:
    """The model that Megatron-Bridge makes of Hugging Face files, of megatron-core's local modules on the CPU, TP 1."""
    import torch.distributed as dist
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    provider = AutoBridge.from_hf_pretrained(src).to_megatron_provider()
    provider.transformer_layer_spec = lambda config, *_, **__: get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention, normalization=config.normalization,
    )  # fmt: skip
    for setting in (
        "gradient_accumulation_fusion",
        "persist_layer_norm",
        "apply_rope_fusion",
        "moe_grouped_gemm",
    ):  # of Apex and TE
        setattr(provider, setting, False)
    provider.finalize()
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def main(work: str, src: str, dst: str, *options: str) -> None:
    """Print one JSON object: seconds, cpu_seconds (of all threads, in the kernel too), peak_bytes."""
    from rl3d.io.pages import use_huge_pages

    use_huge_pages()  # as the command does
    import transformers  # noqa: F401  # what every way needs is there before the clock starts

    from rl3d.io.convert import hf_to_megatron, megatron_to_hf, reshard

    works: dict[str, Callable[..., Any]] = {
        "import": hf_to_megatron, "export": megatron_to_hf, "reshard": reshard, "copy": copy,
        "transformers": through_transformers, "bridge": through_bridge,
    }  # fmt: skip
    settings = {key: value if key == "dtype" else int(value) for key, value in (o.split("=") for o in options)}
    with Watch() as watch:
        start, before = time.monotonic(), time.process_time()
        works[work](src, dst, **settings)
        seconds, cpu = time.monotonic() - start, time.process_time() - before
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": watch.peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
