"""The picture of ``rl3d scale``: throughput over GPUs, and where the seconds of the best step of each size go."""

from pathlib import Path
from typing import Any

import matplotlib

from rl3d.estimate.scale import Candidate
from rl3d.estimate.step import Workload

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

_COLORS = {"generation": "#4878a8", "logprobs": "#8fb4d4", "update": "#d9822b", "switch": "#7a3b8f",
           "host": "#bbbbbb"}  # fmt: skip
_NAMES = {"generation": "generation", "logprobs": "log-probabilities", "update": "update", "switch": "switch",
          "host": "between phases"}  # fmt: skip


def draw(
    path: Path, model: str, cluster: str, work: Workload, best: list[Candidate], strong: list[dict[str, Any]],
    weak: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Write a PNG (or what the name of the file says) of two panels, 16 by 9 inches / 1.45."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), dpi=110)
    sizes = [row["gpus"] for row in strong]
    for rows, label, color, marker in ((weak, "weak scaling", "#d9822b", "s"), (strong, "strong scaling", "#4878a8", "o")):
        left.plot(sizes, [row["tokens_per_s"] for row in rows], color=color, marker=marker, linewidth=2, label=label)
        for row in rows[1:]:
            at = (row["gpus"], row["tokens_per_s"])
            side = (0, 7) if rows is weak else (0, -14)
            left.annotate(f"{row['efficiency']:.0%}", at, xytext=side, textcoords="offset points", color=color,
                          fontsize=9, ha="center")  # fmt: skip
    ideal = [strong[0]["tokens_per_s"] * size / sizes[0] for size in sizes]
    left.plot(sizes, ideal, color="#888888", linewidth=1, linestyle="--", label="ideal")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens / s, all GPUs", xticks=sizes, xticklabels=sizes,
             yticks=ideal, yticklabels=[_short(value) for value in ideal])  # fmt: skip
    left.minorticks_off()
    left.set_title("Throughput of the best pair of layouts", fontsize=11, loc="left")
    left.legend(frameon=False, loc="upper left")

    places = range(len(best))
    bottom = [0.0] * len(best)
    for phase, color in _COLORS.items():
        values = [float(getattr(c.step, phase)) for c in best]
        right.bar(places, values, bottom=bottom, color=color, width=0.62, label=_NAMES[phase])
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    for place, c, top in zip(places, best, bottom, strict=True):
        assert c.step
        text = f"{top:.1f} s\nswitch {1e3 * c.step.switch:.0f} ms"
        right.annotate(text, (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    names = [f"{c.gpus} GPUs\n{c.train}\n→ {c.gen}" for c in best]
    right.set(xticks=list(places), ylabel="seconds a step", ylim=(0, max(bottom) * 1.18))
    right.set_xticklabels(names, fontsize=8)
    right.set_title(f"Where the step goes ({work.sequences} sequences)", fontsize=11, loc="left")
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, alpha=0.5)
        axes.set_axisbelow(True)
    what = "PPO with a critic" if work.critic else "GRPO"
    figure.suptitle(f"{model} on {cluster}, {what}, {work.prompt_len} + {work.response_len} tokens: predicted", fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def _short(value: float) -> str:
    """22014 -> 22k."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{0 if value >= 10 * size else 1}f}{letter}"
    return f"{value:.3g}"
