"""Models by hub id, ``org/name`` or ``org/name@revision``: what of them is fetched, and where it lies.

huggingface_hub does the fetching, with its cache, its environment variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN,
HF_ENDPOINT) and its file locks; it is imported when an id turns up, not before.
"""

import functools
import json
import re
import socket
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Part = Literal["model", "tokenizer"]

_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "spiece.*"),
    *("chat_template*", "config.json"),
)
_MODEL = ("*.safetensors", "*.safetensors.index.json", "generation_config.json", *_TOKENIZER)
# Folders hold the same weights for other programs (original/, onnx/, ...), and so does Mistral's consolidated file.
_NEVER = ("*/*", "consolidated*")
_ANSWER_S = 10.0


class HubError(RuntimeError):
    """A model that is not to be had: says where it was looked for and how to get it."""


@dataclass(frozen=True)
class HubId:
    """A model on a hub. ``revision`` is a branch, a tag or a commit; None means the main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str | Path) -> "HubId | None":
        """The id that ``text`` is, or None for what can only be a path. A directory of that name is a directory."""
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?", str(text))
        if match is None or Path(text).is_dir():
            return None
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return f"hf download {self.repo}" + (f" --revision {self.revision}" if self.revision else "")

    @property
    def cache(self) -> Path:
        """Where this machine's cache keeps it, fetched or not."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repo, repo_type="model")

    def file(self, name: str) -> Path:
        """One small file, from the cache if it is there. Raises :class:`HubError`."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, name, revision=self.revision)
        if isinstance(cached, str):
            return Path(cached)
        try:
            return Path(
                hf_hub_download(self.repo, name, revision=self.revision, local_files_only=_unreachable() is not None)
            )
        except Exception as error:
            raise self._unavailable(error) from error

    def fetch(self, part: Part = "model", *, remote_code: bool = False) -> Path:
        """A directory with all files of ``part``: downloaded if need be, cached if that is all there is.

        Only safetensors, configuration and tokenizer files are asked for, and Python files only with ``remote_code``.
        Raises :class:`HubError`.
        """
        from huggingface_hub import snapshot_download

        patterns = [*(_MODEL if part == "model" else _TOKENIZER), *(("*.py",) if remote_code else ())]
        try:
            found = snapshot_download(
                self.repo, revision=self.revision, allow_patterns=patterns, ignore_patterns=list(_NEVER),
                local_files_only=_unreachable() is not None,
            )  # fmt: skip
        except Exception as error:  # of the network, of the hub, of the disk: all of them leave us without the model
            raise self._unavailable(error) from error
        directory = Path(found)
        lacking = missing_files(directory) if part == "model" else []
        if lacking:
            text = f"{directory} lacks {', '.join(lacking[:4])}" + (" and more" if len(lacking) > 4 else "")
            raise HubError(f"model {str(self)!r}: {text}; `{self.command}` completes it, if the hub has it as safetensors")
        return directory

    def _unavailable(self, error: Exception) -> HubError:
        from huggingface_hub import constants

        said = " ".join(str(error).split())
        said = f"{type(error).__name__}: {said[:300]}" + ("..." if len(said) > 300 else "")
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable()
        offline = f" ({reason}: only the cache is looked at)" if reason else ""
        return HubError(
            f"model {str(self)!r}: there is no directory {Path(str(self)).absolute()}, and it is not to be had from the hub "
            f"or its cache {self.cache}{offline}; where there is a network, run `{self.command}`, or give a Hugging Face "
            f"model directory. The hub's client said: {said}"
        )


def _unreachable() -> str | None:
    """Why the hub cannot be had, or None. Asked before its client, which tries each file for 24 seconds before it looks
    into its cache; behind a proxy, or where only the cache is wanted, the client decides. Good for a minute: the network
    may come back while the process lives."""
    return _ask(int(time.monotonic() // 60))


@functools.lru_cache(maxsize=1)
def _ask(minute: int) -> str | None:
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    host, port = place.hostname or "", place.port or (80 if place.scheme == "http" else 443)
    if constants.HF_HUB_OFFLINE or (urllib.request.getproxies() and not urllib.request.proxy_bypass(host)):
        return None
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError as error:
        return f"{host}:{port} does not answer, {error.strerror or error}"
    return None


def missing_files(directory: Path) -> list[str]:
    """Names of the weight and configuration files that a model directory should hold and does not."""
    lacking = [] if (directory / "config.json").is_file() else ["config.json"]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        lacking += [name for name in shards if not (directory / name).is_file()]
    elif not any(directory.glob("*.safetensors")):
        lacking.append("model.safetensors")
    return lacking
