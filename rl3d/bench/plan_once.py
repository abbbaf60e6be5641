"""One plan in a process of its own, and what it took: python -m rl3d.bench.plan_once MODEL TRAIN GEN GPUS PER_NODE."""

import json
import sys
import time
from pathlib import Path


def main(model: str, train: str, gen: str, gpus: int, per_node: int) -> None:
    """Print one JSON object: CPU seconds beyond imports, peak memory of the process, certificate."""
    from rl3d.estimate.moves import plan_move
    from rl3d.estimate.topology import DEFAULT, Topology
    from rl3d.layout import GenLayout, TrainLayout
    from rl3d.models import Architecture
    from rl3d.models.shapes import find_model

    topology = Topology.read(DEFAULT).with_gpus_per_node(per_node)
    start = time.process_time()
    arch = Architecture.from_hf(find_model(model)[1], convert_only=True)
    move = plan_move(arch, TrainLayout.parse(train), GenLayout.parse(gen), gpus, topology)
    rows = len(move.plan.rows)  # the rows of every rank exist from here on
    seconds = time.process_time() - start
    print(
        json.dumps(
            {**move.to_json(), "rows": rows, "gpus_per_node": per_node, "cpu_seconds": seconds, "peak_bytes": _peak_bytes()}
        )
    )


def _peak_bytes() -> int:
    """Of this process alone; getrusage would count the memory of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
