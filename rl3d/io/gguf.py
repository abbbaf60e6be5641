"""GGUF files (llama.cpp), through transformers' dequantisation: whole in memory in fp32, unlike every other source."""

import importlib.util
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from rl3d.io.hf_reader import CheckpointError, HFReader, _HeldTensors
from rl3d.utils.quiet import quiet_transformers


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that is ``path``, or lies in it where nothing says that it is another kind of checkpoint.

    Raises :class:`CheckpointError` when there are several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{path} holds {len(found)} GGUF files, {found[0].name} among them; name the one to read")
    return found[0] if found else None


class GGUFReader(HFReader):
    """Reads like :class:`HFReader` what transformers made of a GGUF file.

    Attributes:
        sidecars: directory with the configuration and the tokenizer that the file describes; it lives as long as this.

    Raises:
        CheckpointError: a package is missing, or transformers cannot read the file.
    """

    def __init__(self, file: Path):
        self._scratch = tempfile.TemporaryDirectory(prefix="rl3d-gguf-")
        self.directory, self.sidecars = file.parent, Path(self._scratch.name)
        model = load_gguf(file, self.sidecars)
        tensors = {name: t.detach() for name, t in model.state_dict().items()}
        self._files = dict.fromkeys(tensors, file.name)
        self._open, self._lock = {file.name: _HeldTensors(tensors)}, Lock()


def load_gguf(file: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a GGUF file, dequantised; its configuration and tokenizer are written into ``directory``."""
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise CheckpointError(f"reading {file.name} needs the package {module}; pip install {module}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),  # without it the result cannot be saved
                output_loading_info=True,
                **place,
            )
        except Exception as error:  # of gguf, of its parsers, of torch: whatever a file of unknown origin provokes
            raise CheckpointError(f"{file} cannot be read by transformers: {error}") from error
        model, loading = loaded
        wrong = {what: sorted(map(str, loading[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):  # transformers draws what is missing at random and says so in its log
            shown = "; ".join(f"{what.partition('_')[0]}: {', '.join(names[:8])}" for what, names in wrong.items() if names)
            raise CheckpointError(f"{file} does not hold the model that it describes: {shown}")
        model.to(dtype)
        config = model.config
        config.dtype = dtype
        config._name_or_path = ""  # GGUF's general.name is not a path
        config.__dict__.pop("quantization_config", None)  # it is not quantised any more
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        config.save_pretrained(str(directory))
        model.generation_config.save_pretrained(str(directory))
        tokenizer.save_pretrained(str(directory))
    return model
