"""What a cluster's links and GPUs do: a small file or a preset, read strictly.

    name: mine
    gpus_per_node: 8
    inside_gb_per_s: 343        # per GPU and direction, between GPUs of a node
    between_gb_per_s: 50        # per network card and direction, between nodes
    nics_per_node: 8            # default: one for each GPU
    nodes: 4                    # default: any number
    inside_latency_us: 10       # of one message
    between_latency_us: 20
    memory_gb: 80               # of a GPU
    memory_gb_per_s: 3350       # reads of device memory
    copy_gb_per_s: 1500         # payload of a copy inside a GPU, which reads and writes
    peak_tflops: 989            # dense bf16

GB are 10^9 bytes.
"""

import difflib
import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any


class TopologyError(ValueError):
    """A topology that cannot be read or does not match the GPUs; the message names the key, its value and the remedy."""


@dataclass(frozen=True)
class Topology:
    """Links and GPUs of a cluster; rates in GB/s (10^9 bytes) and direction, latencies in microseconds a message."""

    name: str
    gpus_per_node: int
    inside_gb_per_s: float
    between_gb_per_s: float
    nics_per_node: int = 0
    nodes: int | None = None
    inside_latency_us: float = 10.0
    between_latency_us: float = 20.0
    memory_gb: float = 80.0
    memory_gb_per_s: float = 3350.0
    copy_gb_per_s: float = 1500.0
    peak_tflops: float = 989.0

    def __post_init__(self) -> None:
        if self.nics_per_node == 0:
            object.__setattr__(self, "nics_per_node", self.gpus_per_node)
        for key in ("gpus_per_node", "nics_per_node", "nodes"):
            value = getattr(self, key)
            if not (key == "nodes" and value is None) and (type(value) is not int or value < 1):
                raise TopologyError(f"topology {self.name}: {key} = {value!r} must be a whole number, 1 or more")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_s", "_us", "_gb", "_tflops")):
                least = "0 or more" if field.name.endswith("_us") else "above 0"
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or value < 0 or (value == 0 and least == "above 0"):
                    raise TopologyError(f"topology {self.name}: {field.name} = {value!r} must be a number {least}")

    @classmethod
    def read(cls, source: str | Path) -> "Topology":
        """A preset by name, or a YAML or JSON file.

        Raises :class:`TopologyError` for an unknown name, a file that cannot be read, and unknown, missing or
        impossible keys.
        """
        if str(source) in PRESETS:
            return PRESETS[str(source)]
        path = Path(source).expanduser()
        if not path.is_file():
            close = difflib.get_close_matches(str(source), PRESETS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected a YAML or JSON file, or one of {', '.join(PRESETS)}"
            raise TopologyError(f"topology {str(source)!r}: no such file or preset; {hint}")
        return cls.from_mapping(_load(path), path.stem)

    @classmethod
    def from_mapping(cls, values: Any, name: str) -> "Topology":
        """From keys and values; ``name`` is used when they hold none. Raises :class:`TopologyError`."""
        known = {field.name: field for field in fields(cls)}
        if not isinstance(values, dict):
            raise TopologyError(f"topology {name}: expected keys such as gpus_per_node, found {values!r}")
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
                raise TopologyError(f"topology {name}: unknown key {key!r}; {hint}")
        missing = [key for key, f in known.items() if f.default is MISSING and key not in values and key != "name"]
        if missing:
            raise TopologyError(f"topology {name}: {', '.join(missing)} missing; add it")
        return cls(**{"name": name, **values})

    def with_gpus_per_node(self, count: int | None) -> "Topology":
        """The same links with another number of GPUs (and one network card for each) in a node."""
        if count is None or count == self.gpus_per_node:
            return self
        return replace(self, gpus_per_node=count, nics_per_node=count)

    def with_memory(self, gigabytes: float | None) -> "Topology":
        """The same cluster with GPUs of another memory, in GB."""
        return self if gigabytes is None else replace(self, memory_gb=gigabytes)

    def nodes_of(self, world_size: int) -> tuple[int, ...]:
        """Node of each rank, nodes filled one after the other.

        Raises :class:`TopologyError` when the ranks do not fill whole nodes (one node may be filled in part), or need
        more nodes than there are.
        """
        per_node = self.gpus_per_node
        if world_size > per_node and world_size % per_node:
            raise TopologyError(
                f"topology {self.name}: {world_size} GPUs do not fill nodes of {per_node}; use a multiple of {per_node}, "
                f"or say how many a node has (--gpus-per-node, gpus_per_node)"
            )
        needed = -(-world_size // per_node)
        if self.nodes is not None and needed > self.nodes:
            raise TopologyError(
                f"topology {self.name}: {world_size} GPUs need {needed} nodes of {per_node}, but nodes = {self.nodes}; use "
                f"at most {self.nodes * per_node} GPUs or raise nodes"
            )
        return tuple(rank // per_node for rank in range(world_size))


def _load(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)
    except Exception as error:  # both libraries' own errors; what matters is the file and where in it
        raise TopologyError(f"topology {path}: not readable: {' '.join(str(error).split())}") from None


# NVLink 4: 343 GB/s is NCCL send/recv between two H200s; NVLink 3 has two thirds of its lanes' rate. One 400 Gbit/s
# (A100: 200 Gbit/s) card for each GPU. Copies: measured on an H200 (2100 GB/s of payload at 4800 GB/s of memory
# traffic), the others by their memory's rate.
PRESETS = {
    t.name: t
    for t in (
        Topology("h100-8", 8, 343, 50, memory_gb=80, memory_gb_per_s=3350, copy_gb_per_s=1465, peak_tflops=989),
        Topology("h200-8", 8, 343, 50, memory_gb=141, memory_gb_per_s=4800, copy_gb_per_s=2100, peak_tflops=989),
        Topology("a100-8", 8, 229, 25, memory_gb=80, memory_gb_per_s=2039, copy_gb_per_s=892, peak_tflops=312),
        Topology("a100-40g-8", 8, 229, 25, memory_gb=40, memory_gb_per_s=1555, copy_gb_per_s=680, peak_tflops=312),
        Topology("pcie-8", 8, 25, 12.5, nics_per_node=1, memory_gb=48, memory_gb_per_s=864, copy_gb_per_s=378,
                 peak_tflops=362),
    )
}  # fmt: skip
DEFAULT = "h100-8"
