"""Pairs of layouts as people read them: a table, and a sentence on each."""

import argparse
from typing import Any

from rich.table import Table

from rl3d.estimate.scale import Candidate
from rl3d.estimate.step import Workload


def workload_of(args: argparse.Namespace) -> Workload:
    """What the options of :func:`workload` say."""
    return Workload(
        args.prompt_len, args.response_len, args.sequences, args.micro_batch, args.optimizer_steps,
        not args.no_reference, args.critic, args.recompute, args.sequence_parallel, args.offload,
        args.samples,
    )  # fmt: skip


def pairs_table(title: str, shown: list[Candidate], work: Workload) -> Any:
    """A ``rich`` table of candidates that run."""
    table = Table(title=title, title_style="bold", title_justify="left")
    for heading in ("train", "generate"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "step s",
        "generation",
        "log-probs",
        "update",
        "host",
        "switch ms",
        "tokens/s/GPU",
        "GB train",
        "GB gen",
        "GB KV",
    ):
        table.add_column(heading, justify="right")
    for c in shown:
        assert c.step and c.fit
        s = c.step
        digits = 1 if s.total >= 10 else 2
        cells = [f"{seconds:.{digits}f}" for seconds in (s.total, s.generation, s.logprobs, s.update, s.host)]
        cells += [f"{'' if c.move else '~'}{1e3 * s.switch:.0f}", f"{c.tokens_per_second(work):.0f}"]
        cells += [f"{x / 1e9:.1f}" for x in (c.fit.training, c.fit.generation, c.fit.kv_bytes)]
        table.add_row(str(c.train), str(c.gen), *cells)
    return table


def memory_line(c: Candidate) -> str:
    """GB of each phase, and of the fullest one by item."""
    assert c.fit
    peaks = c.fit.peaks
    fullest = max(peaks, key=lambda phase: peaks[phase])
    items = sorted(c.fit.phases[fullest].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in items if size >= 5e7)
    return "; ".join(
        f"{phase} {size / 1e9:.1f}" + (f" ({parts})" if phase == fullest else "") for phase, size in peaks.items()
    )


def why(c: Candidate) -> str:
    """What speaks for and against a pair that runs."""
    assert c.step and c.fit and c.train.dp
    step, parts = c.step, []
    copies = c.gpus // c.gen.tp
    parts.append(f"{copies} {'copy' if copies == 1 else 'copies'} generate")
    if step.waves > 1:
        parts.append(f"the KV cache holds a step's sequences in {step.waves} waves")
    if c.train.pp > 1:
        parts.append(f"stages wait {step.bubble / step.update:.0%} of the update")
    if c.train.zero == 3:
        parts.append("weights are gathered for every pass")
    if c.move is not None:
        cert = c.move.plan.certificate
        moved = max(cert.received, default=0)
        parts.append(f"a switch brings {moved / 1e9:.2f} GB to a rank in {1e3 * step.switch:.0f} ms ({c.move.time.limit})"
                     if moved else f"a switch moves nothing over links ({1e3 * step.switch:.0f} ms of copies)")  # fmt: skip
    spare = c.fit.capacity - max(c.fit.training, c.fit.generation)
    parts.append(f"{spare / 1e9:.0f} GB to spare")
    phase = max(("generation", "logprobs", "update"), key=lambda name: getattr(step, name))
    names = {"generation": "generation", "logprobs": "log-probabilities", "update": "the update"}
    parts.append(f"{names[phase]} takes {getattr(step, phase) / step.total:.0%} of the step")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]
