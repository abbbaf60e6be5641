"""Seconds measured on one and two H200s (docs/gpus.md), each with its prediction, and which of them the constants are
fitted to.

``python -m tests.estimate.measured`` fits the constants anew and prints every figure beside both predictions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rl3d.estimate import generating, kernels
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


# model, GPUs, batch, decode tokens/s, first token ms, prefill ms; prompts of 512 tokens, 256 new ones, passes of 16,384
GENERATION = (
    ("qwen2.5-1.5b", 1, 1, 718, 17, 17), ("qwen2.5-1.5b", 1, 32, 15_311, 80, 80), ("qwen2.5-1.5b", 1, 64, 25_960, 86, 163),
    ("qwen2.5-1.5b", 1, 128, 41_458, 97, 328), ("qwen2.5-1.5b", 1, 256, 64_420, 124, 665),
    ("qwen2.5-1.5b", 2, 1, 469, 23, 23), ("qwen2.5-1.5b", 2, 32, 13_976, 70, 70),
    ("qwen2.5-1.5b", 2, 128, 38_336, 156, 267), ("qwen2.5-1.5b", 2, 256, 72_391, 197, 638),
    ("llama2-7b", 1, 1, 260, 14, 14), ("llama2-7b", 1, 32, 4_285, 382, 382), ("llama2-7b", 1, 128, 7_928, 401, 1_576),
    ("llama2-7b", 2, 1, 277, 62, 62), ("llama2-7b", 2, 32, 6_098, 227, 227), ("llama2-7b", 2, 128, 13_465, 266, 876),
    ("qwen2.5-7b", 1, 128, 18_779, 382, 1_504), ("qwen2.5-7b", 1, 256, 25_297, 404, 3_033),
)  # fmt: skip
FITTED = {("qwen2.5-1.5b", 1, 1), ("qwen2.5-1.5b", 1, 32), ("qwen2.5-1.5b", 1, 256), ("qwen2.5-1.5b", 2, 1),
          ("qwen2.5-1.5b", 2, 32), ("llama2-7b", 1, 128), ("llama2-7b", 2, 128)}  # fmt: skip
_QUEUED = "with two GPUs the first token of several passes is read when more of them have been started"
WHY = {
    ("first token", "qwen2.5-1.5b", 2, 128): _QUEUED, ("first token", "qwen2.5-1.5b", 2, 256): _QUEUED,
    ("decode step", "qwen2.5-1.5b", 2, 128): "a step took nearly as long as that of 256 sequences",
    ("first token", "llama2-7b", 2, 1): "the first call at these sizes warms up",
    ("first token", "llama2-7b", 1, 1): "launching a layer took 0.6 ms for one model and 0.4 for the other",
}  # fmt: skip
WHY_STEP = {("tp2.zero1", "host"): "0.04 s of the step beyond what one GPU and two with DP take"}

# layout, GPUs -> seconds of sampling, old log-probabilities, update, and between the phases; 16 prompts x 8 samples of
# 256 + 256 tokens, rows of 16,384 tokens, qwen2.5-1.5b
STEPS = (
    ("tp1.zero1", 1, 0.705, 0.36, 1.184, 0.111, 2.739),
    ("tp1.dp2.zero2", 2, 0.710, 0.188, 0.676, 0.115, 1.890),
    ("tp2.zero1", 2, 0.696, 0.311, 0.877, 0.153, 2.366),
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
        found.append(Figure(f"decode step: {label}", batch / rate, ask, fitted, why))
        why, ask = WHY.get(("first token", model, tp, batch), ""), partial(_prefill, arch, tp, batch, 0)
        found.append(Figure(f"first token: {label}", first / 1e3, ask, fitted and not why, why))
        if batch > 32:
            found.append(Figure(f"prefill: {label}", whole / 1e3, partial(_prefill, arch, tp, batch, 1), fitted))
    return found


def _prefill(arch: Architecture, tp: int, batch: int, which: int) -> float:
    return prefill(arch, tp, batch, 512, H200, pass_tokens=16384)[which]


def _steps() -> list[Figure]:
    found = []
    for train, gpus, *seconds in STEPS:
        for name, value in zip(("generation", "logprobs", "update", "host", "total"), seconds, strict=True):
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


CONSTANTS = (
    *((kernels, name) for name in ("PRODUCT", "MEMORY", "OVERLAP", "KERNEL", "LAUNCH")),
    *((kernels, name) for name in ("COLLECTIVE", "SMALL_COLLECTIVE", "COLLECTIVE_START")), (generating, "REQUEST"),
)  # fmt: skip


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
