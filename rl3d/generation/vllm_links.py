"""The ways to a running vLLM: in this process, in others behind a ``vllm.LLM``, or behind an ``AsyncLLM``."""

import asyncio
import os
import queue
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from rl3d.generation.engine import GenerationError

Tensors = Iterator[tuple[str, torch.Tensor]]
CHUNK_BYTES = 64 << 20
"""Weights go to other processes in files of this size, or of one tensor."""


class Here:
    """A ``vllm.LLM`` whose model is in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def config(self) -> Any:
        """vLLM's whole configuration."""
        return self.llm.llm_engine.vllm_config

    def busy(self) -> int:
        """Requests under way."""
        return self.llm.llm_engine.get_num_unfinished_requests()

    def add(self, name: str, prompt: list[int], params: Any) -> None:
        """Queue a request."""
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[str, list[int]]]:
        """Wait for the next tokens: (name, all tokens of its response so far) of the requests that got some."""
        return [(o.request_id, list(o.outputs[0].token_ids)) for o in self.llm.llm_engine.step()]

    def abort(self, names: Sequence[str]) -> None:
        """End requests; those that ended already are left alone."""
        self.llm.llm_engine.abort_request(list(names))

    def drawn(self, names: Sequence[str]) -> dict[str, dict[int, Any]]:
        """What was drawn for these sequences since it was last asked: position -> row."""
        from rl3d.generation.vllm_draws import DRAWN

        return {name: DRAWN.pop(name, {}) for name in names}

    def load(self, tensors: Tensors) -> None:
        """Replace the weights; a tensor is valid until the next module's first one is asked for."""
        from rl3d.generation.vllm_worker import pack_embeddings

        # vLLM keeps a tensor until its module's last one has come, an embedding that it pads until the very end
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": ((n, t.clone()) for n, t in tensors)})
        if self.config.device_config.device_type == "cpu":
            self.llm.apply_model(pack_embeddings)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.llm.reset_prefix_cache()

    def sleeps(self) -> bool:
        """Whether it sleeps now."""
        return bool(self.llm.llm_engine.is_sleeping())

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, what: str) -> None:
        self.llm.wake_up(tags=[what])


class Apart(Here):
    """A ``vllm.LLM`` whose workers are other processes of this host."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of :class:`rl3d.generation.vllm_worker.Worker` on all workers."""
        return self.llm.collective_rpc(method, args=args)

    def drawn(self, names: Sequence[str]) -> dict[str, dict[int, Any]]:
        answers = self.call("rl3d_drawn", list(names))
        return {name: next((a[name] for a in answers if a[name]), {}) for name in names}

    def load(self, tensors: Tensors) -> None:
        self.call("rl3d_begin")
        for chunk in _chunks(tensors):
            with _shared_file(chunk) as path:
                self.call("rl3d_take", path)
        self.call("rl3d_finish")


class AsyncApart(Apart):
    """A vLLM ``AsyncLLM``. Its event loop is that which it was made in, or one in a thread of its own."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._box: queue.Queue[tuple[str, list[int] | Exception]] = queue.Queue()
        self._followed: set[str] = set()
        handler = engine.output_handler
        if handler is not None:
            self._loop = handler.get_loop()
        else:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rl3d-vllm", daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside or not self._loop.is_running():
            work.close()
            why = "this is its event loop's own thread" if inside else "its event loop does not run any more"
            raise GenerationError(
                f"the ready AsyncLLM cannot be waited for: {why}; call the actor in another thread while the loop runs "
                f"(await asyncio.to_thread(actor.rollout, ...)), or make the AsyncLLM outside of a loop"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def config(self) -> Any:
        return self.llm.vllm_config

    def busy(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()

    def add(self, name: str, prompt: list[int], params: Any) -> None:
        async def follow() -> None:
            try:
                async with aclosing(self.llm.generate({"prompt_token_ids": prompt}, params, name)) as outputs:
                    async for output in outputs:
                        if name not in self._followed:  # ended before vLLM knew of it
                            break
                        self._box.put((name, list(output.outputs[0].token_ids)))
            except Exception as error:  # carried to whoever waits
                self._box.put((name, error))
            self._followed.discard(name)

        self._followed.add(name)
        asyncio.run_coroutine_threadsafe(follow(), self._loop)

    def step(self) -> list[tuple[str, list[int]]]:
        newest: dict[str, list[int]] = {}
        item: tuple[str, list[int] | Exception] | None = self._box.get()
        while item is not None:
            name, tokens = item
            if isinstance(tokens, Exception):
                raise tokens
            newest[name] = tokens
            try:
                item = self._box.get_nowait()
            except queue.Empty:
                item = None
        return list(newest.items())

    def abort(self, names: Sequence[str]) -> None:
        self._followed.difference_update(names)
        self._run(self.llm.abort(list(names)))

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._run(self.llm.collective_rpc(method, args=args))

    def forget_prefixes(self) -> None:
        self._run(self.llm.reset_prefix_cache())

    def sleeps(self) -> bool:
        return bool(self._run(self.llm.is_sleeping()))

    def sleep(self, level: int) -> None:
        self._run(self.llm.sleep(level=level))

    def wake(self, what: str) -> None:
        self._run(self.llm.wake_up(tags=[what]))


def _chunks(tensors: Tensors) -> Iterator[dict[str, torch.Tensor]]:
    chunk: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        if chunk and sum(t.nbytes for t in chunk.values()) + value.nbytes > CHUNK_BYTES:
            yield chunk
            chunk = {}
        chunk[name] = value.detach().to("cpu", copy=True).contiguous()
    if chunk:
        yield chunk


class _shared_file:
    """The path of a safetensors file, in shared memory where there is some, for as long as the block lasts."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> str:
        from safetensors.torch import save_file

        memory = Path("/dev/shm")
        handle, self.path = tempfile.mkstemp(prefix="rl3d-weights-", dir=memory if memory.is_dir() else None)
        os.close(handle)
        save_file(self.tensors, self.path)
        return self.path

    def __exit__(self, *ignored: Any) -> None:
        Path(self.path).unlink(missing_ok=True)
