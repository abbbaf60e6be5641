"""Draw measured switches and steps beside their predictions: python docs/plot_gpus.py docs/gpus.json OUT.png"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

COLORS = ("#4878a8", "#b8c9dc", "#7aa874", "#d9822b", "#a04848")
PHASES = {"sampling": "#4878a8", "log-probs": "#7aa874", "update": "#d9822b", "switch": "#a04848", "rest": "#bbbbbb"}


def plot(source: Path, out: Path) -> None:
    """Left: milliseconds of switches by transport. Right: seconds of a step by phase, the prediction as a line."""
    found = json.loads(source.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), dpi=110, width_ratios=(3, 2))
    columns = found["switch_columns"]
    width = 0.8 / len(columns)
    for i, (name, color) in enumerate(zip(columns, COLORS, strict=True)):
        places = [at + (i - len(columns) / 2 + 0.5) * width for at in range(len(found["switches"]))]
        left.bar(places, [row[1 + i] for row in found["switches"]], width=width * 0.92, color=color, label=name)
    left.set(xticks=range(len(found["switches"])), ylabel="milliseconds")
    left.set_xticklabels([row[0].replace(" → ", "\n→ ") for row in found["switches"]], fontsize=9)
    left.set_title("Switching Llama-2-7B between two H200s", fontsize=11, loc="left")
    left.set_ylim(0, 1.28 * max(max(row[1:]) for row in found["switches"]))
    left.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    for at, (_, phases, whole, predicted) in enumerate(found["steps"]):
        bottom = 0.0
        for name, seconds in {**phases, "rest": whole - sum(phases.values())}.items():
            right.bar(at, seconds, bottom=bottom, width=0.55, color=PHASES[name], label=name if at == 0 else None)
            bottom += seconds
        right.hlines(predicted, at - 0.36, at + 0.36, color="black", linestyle="--", linewidth=1.5,
                     label="predicted step" if at == 0 else None)  # fmt: skip
    right.set(xticks=range(len(found["steps"])), ylabel="seconds a step")
    right.set_xticklabels([row[0] for row in found["steps"]], fontsize=9)
    right.set_title("GRPO steps of a 1.5B model, 65,536 tokens", fontsize=11, loc="left")
    right.set_ylim(0, 1.38 * max(whole for _, _, whole, _ in found["steps"]))
    right.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, alpha=0.5)
        axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(out, metadata={"Software": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
