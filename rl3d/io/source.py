"""Any checkpoint that can be read, seen the same way: canonical parameters, one at a time, after everything is proved."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl3d.io.export_hf import TEMPLATES_FOLDER
from rl3d.io.finite import all_finite
from rl3d.io.fused import FusedReader
from rl3d.io.gguf import GGUFReader, find_gguf
from rl3d.io.hf_reader import CheckpointError, ConfigurationMissing, HFReader, is_bin, open_hf
from rl3d.io.import_hf import read_shard
from rl3d.io.random_reader import RANDOM_FILE, RandomReader, is_random
from rl3d.io.torch_dist import TRACKER_FILE, TorchDistReader, is_torch_dist
from rl3d.models import Architecture, MappedParameter, fused_tensors, hf_shapes, mapped_parameters
from rl3d.reshard.fingerprint import fingerprint_tensor

MANIFEST_FILE = "conversion.json"
HF_FOLDER = "hf"
"""Where a Megatron checkpoint keeps config.json, tokenizer and templates of the model it came from."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_CHUNK = 1 << 20  # stays in the cache


class Source:
    """A checkpoint whose files hold exactly what its configuration and the family's rules say.

    Args:
        path: Hugging Face directory, GGUF file, ``torch_dist`` directory, or a checkpoint of an rl3d run.
        hf: directory with the ``config.json`` (and tokenizer) of a Megatron checkpoint that has none beside it.
        dtype: dtype to read as; by default the files' own, which must then be one.

    Attributes:
        kind: ``"hf"`` (safetensors), ``"bin"`` (PyTorch files), ``"random"`` (weights that are drawn), ``"rl3d"`` (a
            checkpoint of a run) or ``"torch_dist"``.
        sidecars: directory with config.json and everything else that is not weights.
        parameters: all parameters, the vocabulary unpadded.

    Raises:
        CheckpointError: the files do not hold that.
        UnsupportedModelError: a family, or a setting of it, that no rule covers.
        FileNotFoundError: there is no configuration.
    """

    def __init__(self, path: str | Path, hf: str | Path | None = None, dtype: torch.dtype | None = None):
        self.path = self.weights = Path(path)
        self._reader: HFReader | FusedReader | TorchDistReader | RandomReader
        gguf = find_gguf(self.path)
        if gguf is None and not self.path.is_dir():
            raise CheckpointError(f"{path}: no such directory; expected a Hugging Face or Megatron checkpoint")
        if gguf is not None:
            self.kind, self.weights = "gguf", gguf
            self._reader = reader = GGUFReader(gguf)
            self.sidecars = reader.sidecars
        elif is_torch_dist(self.path):
            self.kind = "torch_dist"
            self._reader = TorchDistReader(self.path)
            self.weights = self._reader.directory
            self.sidecars = self._beside(hf)
        else:
            self.kind = "hf"
            if is_run_checkpoint(self.path):
                self.kind, self.weights = "rl3d", self.path / HF_FOLDER
            elif is_random(self.path):
                self.kind = "random"
            elif is_bin(self.path):
                self.kind = "bin"
            self.sidecars = self.weights
        self.arch = Architecture.from_hf(self.sidecars, convert_only=True)
        self.config: dict[str, Any] = json.loads((self.sidecars / "config.json").read_text())
        self.parameters = mapped_parameters(self.arch, self.arch.vocab_size)
        if self.kind not in ("torch_dist", "gguf"):
            drawn = self.kind == "random"
            self._reader = RandomReader(self.weights, torch.device("cpu")) if drawn else open_hf(self.weights)
        if isinstance(self._reader, HFReader) and self.arch.experts is not None:
            self._reader = FusedReader(self._reader, fused_tensors(self.arch))
        self._prove()
        self.dtype = dtype or self._one_dtype()

    def _beside(self, hf: str | Path | None) -> Path:
        beside = next((p / HF_FOLDER for p in (self.weights, self.path) if (p / HF_FOLDER).is_dir()), None)
        if hf is None and beside is None:
            raise ConfigurationMissing(
                f"{self.path} has no {HF_FOLDER}/config.json; say with --hf which Hugging Face directory the model came from"
            )
        return Path(hf) if hf is not None else beside or self.path

    def _prove(self) -> None:
        if isinstance(self._reader, TorchDistReader):
            self._reader.check([m.spec for m in self.parameters])
            return
        head = "lm_head.weight"
        self._reader.check(hf_shapes(self.arch), tied_head=head if self.arch.tied else None)
        if self.arch.tied and isinstance(self._reader, HFReader | FusedReader) and head in self._reader.names:
            self._require_equal("model.embed_tokens.weight", head)

    def _require_equal(self, name: str, other: str) -> None:
        assert isinstance(self._reader, HFReader | FusedReader)
        shapes = [self._reader.shape(n) for n in (name, other)]
        step = max(1, _CHUNK // (4 * shapes[0][1]))
        equal = shapes[0] == shapes[1] and all(
            torch.equal(*(self._reader.read(n, (a, a + step)) for n in (name, other))) for a in range(0, shapes[0][0], step)
        )
        if not equal:
            raise CheckpointError(
                f"{other} differs from {name}, in {self._reader.file(other)}: config.json says tie_word_embeddings, so one "
                f"of them would be lost"
            )

    def file_dtypes(self) -> dict[str, torch.dtype]:
        """What each tensor that is read is stored as."""
        if isinstance(self._reader, TorchDistReader):
            return {m.spec.name: self._reader.dtype(m.spec) for m in self.parameters}
        if isinstance(self._reader, RandomReader):
            return dict.fromkeys(hf_shapes(self.arch), torch.float32)
        return {name: self._reader.dtype(name) for name in hf_shapes(self.arch)}

    def _one_dtype(self) -> torch.dtype:
        found = self.file_dtypes()
        kinds = list(found.values())
        common = max(set(kinds), key=kinds.count)
        own = {name for m in self.parameters if m.keeps_dtype for name in (m.spec.name, *(s.hf_name for s in m.segments))}
        other = [f"{name} has dtype {dtype}" for name, dtype in found.items() if dtype != common and name not in own]
        if other:
            shown = "; ".join(other[:8]) + (f"; and {len(other) - 8} more" if len(other) > 8 else "")
            raise CheckpointError(
                f"{self.weights}: {shown}; expected {common}, as the other {kinds.count(common)} tensors; say --dtype to "
                f"convert them all"
            )
        if common not in DTYPES.values():
            raise CheckpointError(f"{self.weights} is stored as {common}; say --dtype to choose among {', '.join(DTYPES)}")
        return common

    def dtype_of(self, mapped: MappedParameter) -> torch.dtype:
        """What :meth:`read` gives the parameter as: the checkpoint's dtype, or its own where it must keep it."""
        if not mapped.keeps_dtype or isinstance(self._reader, RandomReader):
            return self.dtype
        if isinstance(self._reader, TorchDistReader):
            return self._reader.dtype(mapped.spec)
        return self._reader.dtype(mapped.segments[0].hf_name)

    @torch.no_grad()
    def read(self, mapped: MappedParameter) -> Tensor:
        """One whole parameter in canonical form. The vocabulary is as padded as ``mapped`` says, with zeros.

        Raises :class:`CheckpointError` for values that are not finite, as stored or as converted.
        """
        if not isinstance(self._reader, TorchDistReader):
            out = torch.empty(mapped.spec.shape, dtype=self.dtype_of(mapped))
            read_shard(self._reader, mapped, 1, 0, out)
            return out
        stored = self._reader.read(mapped.spec)
        out = stored.to(self.dtype_of(mapped))
        if out.dtype != stored.dtype and not all_finite(out):
            raise CheckpointError(f"{mapped.spec.name} in {self.weights} holds values beyond {self.dtype}; choose another")
        return out

    def fingerprint(self, mapped: MappedParameter) -> int:
        return fingerprint_tensor(self.read(mapped), mapped.spec.valid_rows, _CHUNK)

    def manifest(self) -> dict[str, Any] | None:
        """What the conversion that made the checkpoint recorded."""
        file = self.weights / MANIFEST_FILE
        return json.loads(file.read_text()) if file.is_file() else None

    def stat(self) -> list[tuple[str, int, int]]:
        """(name, size, time of change) of every file: what a resumed conversion must find unchanged."""
        files = {self.weights} if self.kind == "gguf" else {*self.weights.iterdir(), *self.sidecars.iterdir()}
        return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file())

    def copy_sidecars(self, target: Path) -> None:
        """Everything but weights, byte for byte; config.json changes only where it would say another dtype."""
        target.mkdir(exist_ok=True)
        for file in sorted(self.sidecars.iterdir()):
            skip = file.name.startswith(".") or file.name in (MANIFEST_FILE, TRACKER_FILE, RANDOM_FILE)
            if file.is_file() and not skip and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, target / file.name)
        if (self.sidecars / TEMPLATES_FOLDER).is_dir():
            shutil.copytree(self.sidecars / TEMPLATES_FOLDER, target / TEMPLATES_FOLDER)
        name = str(self.dtype).removeprefix("torch.")
        key = "torch_dtype" if "torch_dtype" in self.config and "dtype" not in self.config else "dtype"
        if self.config.get(key, name) != name:
            text = json.dumps({**self.config, key: name}, indent=2)
            (target / "config.json").write_text(text + "\n")


def is_run_checkpoint(path: Path) -> bool:
    """Whether the directory is a checkpoint (``step_N``) of an rl3d run, which holds its weights as Hugging Face files."""
    return (path / "state.json").is_file() and (path / HF_FOLDER).is_dir()
