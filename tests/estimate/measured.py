"""Seconds measured on one and two H200s (docs/gpus.md), each with its prediction, and which of them the constants are
fitted to.

``python -m tests.estimate.measured`` fits the constants anew and prints every figure beside both predictions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rl3d.estimate import kernels
from rl3d.estimate.generating import decode_step, prefill
from rl3d.estimate.moves import plan_move
from rl3d.estimate.step import StepTime, Workload, predict_step
from rl3d.estimate.time import predict_move
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture, parameter_specs
from rl3d.models.shapes import shape
from rl3d.reshard import build_plan

H200 = Topology.read("h200-8")
ARCHS = {name: Architecture.from_hf(shape(name)) for name in ("qwen2.5-1.5b", "llama2-7b", "qwen2.5-7b")}


@dataclass(frozen=True)
class Figure:
    """One measurement. ``fitted``: the constants were fitted to it; ``why`` says what the model leaves out, where more
    than the bound is missing."""

    name: str
    measured: float
    predict: Callable[[], float]
    fitted: bool = False
    why: str = ""


# model, GPUs, batch, decode tokens/s, first token ms, prefill ms; prompts of 512 tokens, 256 new ones, passes of 16,384.
# 0 where two GPUs have not been measured since hosts stopped to wait for the draws of a batch narrower than the largest, and
# the clock to take in the making of prompts.
GENERATION = (
    ("qwen2.5-1.5b", 1, 1, 782, 18, 0), ("qwen2.5-1.5b", 1, 32, 16_638, 85, 85), ("qwen2.5-1.5b", 1, 64, 28_791, 91, 163),
    ("qwen2.5-1.5b", 1, 128, 46_400, 102, 322), ("qwen2.5-1.5b", 1, 256, 64_611, 98, 623),
    ("qwen2.5-1.5b", 2, 1, 0, 23, 0), ("qwen2.5-1.5b", 2, 32, 0, 70, 0), ("qwen2.5-1.5b", 2, 256, 72_391, 0, 0),
    ("llama2-7b", 1, 1, 264, 18, 18), ("llama2-7b", 1, 32, 4_600, 345, 345), ("llama2-7b", 1, 128, 8_260, 347, 1_409),
    ("llama2-7b", 2, 32, 0, 227, 0), ("llama2-7b", 2, 128, 13_465, 0, 858),
    ("qwen2.5-7b", 1, 128, 19_881, 339, 1_382), ("qwen2.5-7b", 1, 256, 25_335, 347, 2_772),
)  # fmt: skip
FITTED = {("qwen2.5-1.5b", 1, 1), ("qwen2.5-1.5b", 1, 32), ("qwen2.5-1.5b", 1, 256), ("llama2-7b", 1, 1),
          ("llama2-7b", 1, 128), ("qwen2.5-7b", 1, 128)}  # fmt: skip
_QUEUED = "of several passes the first token is read when the next has been started, kernel by kernel"
WHY = {("first token", "qwen2.5-1.5b", 1, 128): _QUEUED, ("first token", "qwen2.5-1.5b", 1, 256): _QUEUED}
WHY_STEP: dict[tuple[str, str], str] = {}

# layout, GPUs -> seconds of sampling, old log-probabilities, update, and between the phases; 16 prompts x 8 samples of
# 256 + 256 tokens, rows of 16,384 tokens, qwen2.5-1.5b
STEPS = (
    ("tp1.zero1", 1, 0.636, 0.363, 1.157, 0.042, 2.578),
    ("tp1.dp2.zero2", 2, 0, 0.188, 0.676, 0, 0),
    ("tp2.zero1", 2, 0, 0.311, 0.877, 0, 0),
)  # fmt: skip

# train, generate -> milliseconds there and back through the peer's memory, Llama-2-7B on two GPUs
SWITCHES = (("tp2.zero1", "tp1", 26.1, 7.2), ("tp1.pp2.zero1", "tp2", 15.6, 15.5), ("tp1.pp2.zero1", "tp1", 27.5, 7.7),
            ("tp1.zero3", "tp2", 13.7, 12.9), ("tp1.zero1", "tp2", 7.6, 28.6))  # fmt: skip


def step(train: str, gpus: int, *, critic: bool = False) -> StepTime:
    """The prediction of one of :data:`STEPS`."""
    layout = TrainLayout.parse(train)
    work = Workload(256, 256, 128, micro_batch=32, samples=8, critic=critic, sequence_parallel=layout.tp > 1)
    return predict_step(ARCHS["qwen2.5-1.5b"], layout, GenLayout(1), gpus, H200, work)


def figures() -> list[Figure]:
    """All of them."""
    return [*_generation(), *_steps(), *_switches(), *_older()]


def _generation() -> list[Figure]:
    found = []
    for model, tp, batch, rate, first, whole in GENERATION:
        arch, fitted = ARCHS[model], (model, tp, batch) in FITTED
        label = f"{model}, tp{tp}, batch {batch}"
        why, ask = WHY.get(("decode step", model, tp, batch), ""), partial(decode_step, arch, tp, batch, 640, H200)
        if rate:
            found.append(Figure(f"decode step: {label}", batch / rate, ask, fitted, why))
        why, ask = WHY.get(("first token", model, tp, batch), ""), partial(_prefill, arch, tp, batch, 0)
        if first:
            found.append(Figure(f"first token: {label}", first / 1e3, ask, fitted and not why, why))
        if batch > 32 and whole:
            found.append(Figure(f"prefill: {label}", whole / 1e3, partial(_prefill, arch, tp, batch, 1), fitted))
    return found


def _prefill(arch: Architecture, tp: int, batch: int, which: int) -> float:
    return prefill(arch, tp, batch, 512, H200, pass_tokens=16384)[which]


def _steps() -> list[Figure]:
    found = []
    for train, gpus, *seconds in STEPS:
        for name, value in zip(("generation", "logprobs", "update", "host", "total"), seconds, strict=True):
            if not value:
                continue
            why = WHY_STEP.get((train, name), "")
            found.append(Figure(f"{name}: {train}", value, partial(_phase, train, gpus, name), gpus == 1 and name != "total",
                                why))  # fmt: skip
    return found


def _phase(train: str, gpus: int, name: str) -> float:
    return getattr(step(train, gpus), name) / (2 if name == "logprobs" else 1)  # with the reference's


def _switches() -> list[Figure]:
    found = []
    for train, gen, *both in SWITCHES:
        for way, value in zip(("", "back: "), both, strict=True):
            ask = partial(_switch, train, gen, bool(way))
            found.append(Figure(f"switch: {way}{train} -> {gen}", value / 1e3, ask, (train, way) == ("tp1.zero1", "")))
    return found


def _switch(train: str, gen: str, back: bool) -> float:
    links = H200.with_gpus_per_node(2)
    move = plan_move(ARCHS["llama2-7b"], TrainLayout.parse(train), GenLayout.parse(gen), 2, links)
    if not back:
        return move.time.seconds
    specs = parameter_specs(ARCHS["llama2-7b"], ARCHS["llama2-7b"].padded_vocab(move.train.tp, move.gen.tp), "bfloat16")
    return predict_move(build_plan(specs, move.target, move.source), links).seconds


def _older() -> list[Figure]:
    """PPO on one GPU, and the prototype that this engine was made after."""
    found = [Figure("values: ppo", 0.37, partial(_critic, "logprobs")),
             Figure("critic update: ppo", 1.05, partial(_critic, "update"))]  # fmt: skip
    for model, batch, rate in (("qwen2.5-1.5b", 128, 46_666), ("qwen2.5-1.5b", 256, 64_376), ("qwen2.5-7b", 128, 19_382)):
        ask = partial(decode_step, ARCHS[model], 1, batch, 900, H200)
        found.append(Figure(f"decode step, prototype: {model}, batch {batch}", batch / rate, ask))
    return found


def _critic(phase: str) -> float:
    return getattr(step("tp1.zero1", 1, critic=True), phase) - getattr(step("tp1.zero1", 1), phase)


CONSTANTS = tuple((kernels, name) for name in ("PRODUCT", "MEMORY", "OVERLAP", "KERNEL", "LAUNCH"))
"""Those of collectives stay what an earlier fit found, with figures of decoding on two GPUs that are void now."""


def fit() -> dict[str, float]:
    """The constants that suit the fitted figures best, by least squares of the logarithms; they are in place afterwards."""
    from scipy.optimize import least_squares

    start = [getattr(module, name) for module, name in CONSTANTS]
    chosen = [figure for figure in figures() if figure.fitted]

    def errors(factors: list[float]) -> list[float]:
        for (module, name), value, factor in zip(CONSTANTS, start, factors, strict=True):
            setattr(module, name, value * factor)
        return [math.log(figure.predict() / figure.measured) for figure in chosen]

    errors(least_squares(errors, [1.0] * len(start), loss="soft_l1", f_scale=0.1, bounds=(0.4, 2.5)).x)
    return {name: getattr(module, name) for module, name in CONSTANTS}


def main() -> None:
    before = [figure.predict() for figure in figures()]
    print({name: float(f"{value:.3g}") for name, value in fit().items()})
    for figure, old in zip(figures(), before, strict=True):
        error, fitted = old / figure.measured - 1, figure.predict() / figure.measured - 1
        mark = "<-" if abs(error) > 0.15 else ""
        print(f"{'fitted' if figure.fitted else 'held':6s} {figure.name:52s} {1e3 * figure.measured:8.2f} ms "
              f"{1e3 * old:8.2f} {error:+4.0%}   fitted anew {fitted:+4.0%} {mark}")  # fmt: skip


if __name__ == "__main__":
    main()
