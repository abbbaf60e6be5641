"""Draw the reward curve of a run: python docs/plot_rewards.py RUN_DIR OUT.png (needs matplotlib)."""

import json
import sys
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def plot(run_dir: Path, out: Path) -> None:
    """Mean, lowest and highest score of each step over the seconds that the steps took."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if not rows:
        raise SystemExit(f"{run_dir / 'metrics.jsonl'} has no rows")
    seconds = list(accumulate(row["timing_s/step"] for row in rows))
    figure, axes = plt.subplots(figsize=(7, 3), dpi=110)
    low, high, mean = ([row[f"critic/score/{name}"] for row in rows] for name in ("min", "max", "mean"))
    axes.fill_between(seconds, low, high, color="#4878a8", alpha=0.15, linewidth=0, label="lowest to highest of a step")
    axes.plot(seconds, mean, color="#4878a8", linewidth=2, label="mean of a step")
    axes.set(xlabel="seconds of training", ylabel="reward", xlim=(0, seconds[-1]), ylim=(0, max(1.0, *high) * 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.legend(loc="center right", frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Software": None})
    print(f"{out}: {len(rows)} steps, mean reward {mean[0]:.3f} -> {mean[-1]:.3f} in {seconds[-1]:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
