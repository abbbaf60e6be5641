"""One conversion in a process of its own, and what it took: python -m rl3d.bench.convert_once WORK SRC DST [KEY=VALUE ...].

Memory is anonymous memory (/proc/self/smaps_rollup), what a process cannot give back to the page cache, above what it was
once everything was imported.
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
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup says nothing about anonymous memory")


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
    """Megatron-Bridge's way from Hugging Face files to a Megatron checkpoint."""
    from megatron.bridge import AutoBridge  # type: ignore[import-not-found]

    AutoBridge.import_ckpt(src, dst)


def main(work: str, src: str, dst: str, *options: str) -> None:
    """Print one JSON object: seconds, peak_bytes."""
    import transformers  # noqa: F401  # what every way needs is there before the clock starts

    from rl3d.io.convert import hf_to_megatron, megatron_to_hf, reshard

    works: dict[str, Callable[..., Any]] = {
        "import": hf_to_megatron, "export": megatron_to_hf, "reshard": reshard, "copy": copy,
        "transformers": through_transformers, "bridge": through_bridge,
    }  # fmt: skip
    settings = {key: value if key == "dtype" else int(value) for key, value in (o.split("=") for o in options)}
    with Watch() as watch:
        start = time.monotonic()
        works[work](src, dst, **settings)
        seconds = time.monotonic() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": watch.peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
