"""Checks of switches on four ranks; facts go back to test_switch.py, which asserts on them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine.carry import training_state
from rl3d.engine.hybrid import SwitchReport
from rl3d.engine.policy import TrainSample
from rl3d.reshard.fingerprint import compare
from tests.reference import sequences

DEFERRED = (
    ("tp2.pp1.zero1", "tp4", "float32"), ("tp1.pp2.zero1", "tp2", "float32"), ("tp1.pp1.zero2", "tp1", "float32"),
    ("tp2.pp1.zero1", "tp2", "bfloat16"),
)  # fmt: skip
PARKED = (("tp2.pp1.zero1", "bfloat16"), ("tp2.pp1.zero2", "float32"), ("tp2.pp1.zero3", "float32"))
BAD = "decoder.layers.1.mlp.linear_fc2.weight"


def main(runtime: Any, directory: str, wide: bool) -> dict[str, Any]:
    """``wide``: in more layouts."""
    root = Path(directory)
    return {
        "deferred": [_deferred(root, *case) for case in DEFERRED],
        "parked": [_parked(root, *case) for case in PARKED],
        "places": [
            _places(root, *case) for case in (("tp2.pp1.zero1", "tp2"), ("tp1.pp2.zero1", "tp1"), ("tp2.pp2.zero1", "tp4"))
        ],  # fmt: skip
        "refused": _refused(root),
        "memory": _memory(root),
        "changed": _changed(root),
        "sampled": _sampled(root),
        "subset": [_subset(root, train) for train in ("tp2.pp1.zero1", "tp1.pp1.zero1")[: 1 + wide]],
        "calls": _calls(root),
        "strategy": _strategy(root),
        "grown": [
            _grown(root, train, tied) for train, tied in (("tp2.pp2.zero1", True), ("tp2.pp1.zero3", False))[: 1 + wide]
        ],
    }


def _actor(root: Path, train: str, gen: str, **options: Any) -> Actor:
    config = PPOConfig(batch_size=8, kl_coef=0.0, lr=1e-3, max_grad_norm=0.5)
    return Actor(root / "untied", train=train, gen=gen, algorithm=config, **options)


def _learn(actor: Actor, steps: int = 2) -> None:
    """``steps`` optimiser steps of one update, on samples that are the same everywhere."""
    samples = [TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), (-1.0) ** i)
               for i, s in enumerate(sequences(0))]  # fmt: skip
    share = len(samples) // steps
    actor.learn(samples, [range(i * share, (i + 1) * share) for i in range(steps)], 1.0, lambda: 1e-3)


def _everywhere(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _figures(report: SwitchReport) -> dict[str, Any]:
    names = ("source", "gathered_bytes", "allocated", "freed", "host_bytes", "host_copied", "arena_bytes", "alias_bytes",
             "bytes_received", "verified", "total_seconds")  # fmt: skip
    return {name: getattr(report, name) for name in names}


def _deferred(root: Path, train: str, gen: str, dtype: str) -> dict[str, Any]:
    """Two rounds of update and generation, with and without the all-gather after each update's last step."""
    problems, facts = [], {}
    plain = _actor(root, train, gen, dtype=dtype, alias="off")
    late = _actor(root, train, gen, dtype=dtype, defer_gather=True, verify="full")
    for turn in range(2):
        for actor in (plain, late):
            _learn(actor)
        facts["pending"] = _everywhere([plain.parts.train.zero.gather_pending, late.parts.train.zero.gather_pending])
        plain.switch_to_generation()
        there = late.switch_to_generation()
        problems += compare(plain.hybrid.generation_fingerprints(), late.hybrid.generation_fingerprints())
        plain.switch_to_training()
        back = late.switch_to_training()
        facts[f"reports {turn}"] = _everywhere([_figures(there), _figures(back)])
        problems += compare(plain.hybrid.training_fingerprints(), late.hybrid.training_fingerprints())
    masters = [torch.equal(a, b) for a, b in zip(plain.parts.train.zero.master_partitions(),
                                                 late.parts.train.zero.master_partitions(), strict=True)]  # fmt: skip
    _learn(late)  # somebody needs the whole weights in training: they are gathered
    assert late.parts.train.weights
    facts["needed"] = _everywhere(late.parts.train.zero.gather_pending)
    return {**facts, "problems": problems, "masters": _everywhere(all(masters))}


def _parked(root: Path, train: str, dtype: str) -> dict[str, Any]:
    """The same with gradients and optimiser state off the device during generation."""
    plain = _actor(root, train, "tp4", dtype=dtype)
    parked = _actor(root, train, "tp4", dtype=dtype, gradients="drop", optimizer_state="host")
    zero = parked.parts.train.zero
    problems, reports = [], []
    for turn in range(3):
        for actor in (plain, parked):
            if turn < 2:
                _learn(actor)
        held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in zero.optimizer_tensors()}.values())
        buffers = [
            b.data_ptr()
            for place in parked.hybrid.parking._places.values()
            for _, b, _ in place._buffers.values()
            if b is not None
        ]
        there = parked.switch_to_generation()
        away = sum(t.untyped_storage().nbytes() for t in (*zero.optimizer_tensors(), *zero.gradient_tensors()))
        plain.switch_to_generation()
        problems += compare(plain.hybrid.generation_fingerprints(), parked.hybrid.generation_fingerprints())
        back = parked.switch_to_training()
        plain.switch_to_training()
        reports.append({"held": held, "away": away, "there": _figures(there), "back": _figures(back), "buffers": buffers})
        problems += compare(plain.hybrid.training_fingerprints(), parked.hybrid.training_fingerprints())
    moments = [
        torch.equal(a, b)
        for one, other in zip(plain.parts.train.zero.optimizer_tensors(), zero.optimizer_tensors(), strict=True)
        for a, b in ((one, other),)
    ]
    masters = sum(t.nbytes for t in zero.master_partitions())
    return {"problems": problems, "reports": _everywhere(reports), "moments": _everywhere(all(moments)), "masters": masters}


def _places(root: Path, train: str, gen: str) -> dict[str, Any]:
    """Where generation weights lie over ten switches with updates between them."""
    actor, plain = _actor(root, train, gen), _actor(root, train, gen, alias="off", transport="p2p")
    total = sum(t.nbytes for t in actor.hybrid.gen_weights.values())
    seen, figures = set(), {}
    for _ in range(5):
        _learn(actor, steps=1)
        figures = _figures(actor.switch_to_generation())
        seen.add(tuple(t.data_ptr() for t in actor.hybrid.gen_weights.values()))
        parameters = {p.data_ptr() for p in actor.hybrid.generator.model.parameters()}
        assert parameters == set(next(iter(seen)))
        wrong = compare(actor.hybrid.training_fingerprints(), actor.hybrid.generation_fingerprints())
        actor.switch_to_training()
        _learn(plain, steps=1)
        plain.switch_to_generation()
        wrong += compare(plain.hybrid.generation_fingerprints(), actor.hybrid.training_fingerprints())
        plain.switch_to_training()
    return {"train": train, "gen": gen, "addresses": _everywhere(len(seen)), "total": _everywhere(total), "wrong": wrong,
            "figures": _everywhere(figures)}  # fmt: skip


def _outcome(call: Any) -> list[str]:
    """Type and message of what each rank raised."""
    try:
        call()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return _everywhere(text)


def _usable(actor: Actor) -> list[str]:
    """What is wrong after a failure that is over: a round trip with generation and an update."""
    actor.switch_to_generation()
    problems = (
        compare(actor.hybrid.training_fingerprints(), actor.hybrid.generation_fingerprints())
        if not actor.hybrid.copy.leaves
        else []
    )
    actor.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, temperature=0.0)
    actor.switch_to_training()
    _learn(actor)
    return problems


def _refused(root: Path) -> dict[str, Any]:
    """A NaN and an infinity on one rank each are not handed over, whatever the level of verification."""
    actor = _actor(root, "tp2.pp2.zero1", "tp4", gradients="drop", optimizer_state="host")
    zero = actor.parts.train.zero
    out: dict[str, Any] = {}
    for label, value in (("nan", float("nan")), ("inf", float("inf"))):
        weights = actor.parts.train.weights
        saved = None
        if BAD in weights:
            saved = weights[BAD].clone()
            weights[BAD].view(-1)[3] = value
        actor.hybrid.weights_changed()
        out[label] = _outcome(actor.switch_to_generation)
        there = all(t.untyped_storage().nbytes() for t in zero.optimizer_tensors())
        out[f"{label} mode"] = _everywhere([actor.hybrid.mode, actor.hybrid.parking.host_bytes > 0, there])
        if saved is not None:
            weights[BAD].copy_(saved)
    return {**out, "usable": _usable(actor)}


def _memory(root: Path) -> dict[str, Any]:
    """Memory that does not suffice on one rank half-way: all ranks go on in the old mode."""
    actor = _actor(
        root, "tp2.pp1.zero1", "tp1", training_copy="drop", optimizer_state="host", gradients="drop", verify="full"
    )
    _learn(actor)
    generator, rank = actor.hybrid.side.generator, actor.runtime.rank

    def refuse() -> int:
        raise torch.OutOfMemoryError("the test's device is full")

    if rank == 2:
        generator.allocate_cache = refuse
    there = _outcome(actor.switch_to_generation)
    mode = _everywhere(actor.hybrid.mode)
    if rank == 2:
        del generator.allocate_cache
    _learn(actor)
    actor.switch_to_generation()
    ids = torch.tensor([[3, 4, 5], [7, 8, 9]])
    before = actor.generate(ids, max_new_tokens=4, temperature=0.0)
    restore = actor.hybrid.copy.restore
    if rank == 1:
        actor.hybrid.copy.restore = refuse
    back = _outcome(actor.switch_to_training)
    freed = _everywhere([t.untyped_storage().nbytes() for t in actor.parts.train.zero.flat_weights()])
    after = actor.generate(ids, max_new_tokens=4, temperature=0.0)
    actor.hybrid.copy.restore = restore
    actor.switch_to_training()
    come = actor.hybrid.parking.come
    actor.switch_to_generation()
    if rank == 3:
        actor.hybrid.parking.come = refuse
    late = _outcome(actor.switch_to_training)
    again = actor.generate(ids, max_new_tokens=4, temperature=0.0)
    actor.hybrid.parking.come = come
    actor.switch_to_training()
    return {"there": there, "mode": mode, "back": back, "freed": freed, "late": late, "usable": _usable(actor),
            "same": bool(torch.equal(before, after) and torch.equal(before, again))}  # fmt: skip


def _changed(root: Path) -> dict[str, Any]:
    """A value that changes on its way, and one that differs between replicas, are found with ``full``."""
    actor = _actor(root, "tp2.pp1.zero1", "tp1", verify="full", alias="off")
    mover = actor.hybrid._movers.whole(actor.hybrid.side)
    run = mover.run

    def disturbed() -> Any:
        report = run()
        actor.hybrid.gen_weights[BAD].view(-1).view(torch.int32)[5] ^= 1
        return report

    if actor.runtime.rank == 1:
        mover.run = disturbed
    found = _outcome(actor.switch_to_generation)
    mode = _everywhere(actor.hybrid.mode)
    if actor.runtime.rank == 1:
        del mover.run
    return {"found": found, "mode": mode, "usable": _usable(actor)}


def _sampled(root: Path) -> dict[str, Any]:
    """Which parameters sixteen switches have looked at."""
    actor = _actor(root, "tp2.pp1.zero1", "tp4", verify="sampled")
    counts = [actor.switch_to_generation().verified if turn % 2 == 0 else actor.switch_to_training().verified
              for turn in range(16)]  # fmt: skip
    return {"counts": counts, "parameters": len(actor.hybrid.specs)}


def _subset(root: Path, train: str) -> dict[str, Any]:
    """Generation on some of the ranks, on others, and on all again."""
    actor = _actor(root, train, "tp1", verify="full", gradients="drop")
    ids = torch.tensor([[3, 4, 5], [7, 8, 9], [11, 12, 13], [1, 2, 3]])  # one for each replica
    facts: dict[str, Any] = {"tokens": [], "problems": []}
    for turn, ranks in enumerate((None, [3, 1], [0], [3, 1], None)):
        if turn == 3:
            _learn(actor)
        report = actor.switch_to_generation(device_ids=ranks)
        hybrid = actor.hybrid
        facts["problems"] += compare(hybrid.training_fingerprints(), hybrid.generation_fingerprints())
        facts["tokens"].append(actor.generate(ids, max_new_tokens=5, temperature=0.0, stop_token_ids=[]).tolist())
        facts[f"held {turn}"] = _everywhere([sum(t.nbytes for t in hybrid.gen_weights.values()), hybrid.arena.nbytes,
                                             report.cache_bytes + (hybrid.side.generator.cache_bytes if hybrid.side.generator
                                                                   else 0)])  # fmt: skip
        facts[f"figures {turn}"] = _everywhere([report.freed.get("generation weights", 0),
                                                report.allocated.get("generation weights", 0)])  # fmt: skip
        if turn != 1:  # from one set straight to the next
            actor.switch_to_training()
    facts["errors"] = [
        _outcome(lambda ranks=ranks: actor.switch_to_generation(device_ids=ranks)) for ranks in ([], [1, 1], [2, 9])
    ] + [_outcome(lambda: actor.switch_to_training(device_ids=[0, 1]))]
    actor.switch_to_training(device_ids=[0, 1, 2, 3])
    return {**facts, "usable": _usable(actor)}


def _calls(root: Path) -> dict[str, Any]:
    """Switches called on rank 0 alone, with arguments; and calls that do not agree."""
    actor, rank = _actor(root, "tp2.pp1.zero1", "tp2"), dist.get_rank()
    if rank == 0:
        actor.switch_to_generation(device_ids=[1, 2])
    dist.barrier()
    sides = _everywhere([actor.hybrid.mode, list(actor.hybrid.side.ranks)])
    if rank == 0:
        actor.switch_to_training()
    dist.barrier()
    modes = _everywhere(actor.hybrid.mode)
    actor.call("together", lambda: None)  # what listeners carried out is behind all main threads
    actor._channel.grace_s = 600.0  # calls are left to the main threads, however busy the machine is
    dist.barrier()
    order = _outcome(actor.switch_to_generation if rank != 2 else actor.switch_to_training)
    sets = _outcome(lambda: actor.switch_to_generation(device_ids=[0, 1] if rank else [2, 3]))
    mode = _everywhere(actor.hybrid.mode)
    return {"sides": sides, "modes": modes, "order": order, "sets": sets, "mode": mode, "usable": _usable(actor)}


def _strategy(root: Path) -> dict[str, Any]:
    """The key/value cache as a switch asks for it: bytes in training mode afterwards."""
    actor = _actor(root, "tp2.pp1.zero1", "tp4", max_sequences=4, max_sequence_length=64)
    ids = torch.tensor([[3, 4, 5], [7, 8, 9]])
    kept = {}
    for strategy in ("full", None, "lightweight", "adaptive"):
        actor.switch_to_generation(cache_strategy=strategy)
        actor.generate(ids, max_new_tokens=3, temperature=0.0)
        actor.switch_to_training()
        kept[str(strategy)] = actor.hybrid.side.generator.cache_bytes
    actor.switch_to_generation(cache_strategy="full")
    actor.switch_to_generation(cache_strategy="lightweight")
    return {"kept": kept, "changed": actor.hybrid.side.generator.cache_strategy,
            "error": _outcome(lambda: actor.switch_to_generation(cache_strategy="most"))}  # fmt: skip


class Tokens:
    """As much of a tokenizer as the actor asks for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.eos_token_id, self.pad_token_id = 2, size - 1

    def __len__(self) -> int:
        return self.size

    def save_pretrained(self, directory: Any) -> None:
        (Path(directory) / "tokens.txt").write_text(str(self.size))


def _optimizer(actor: Actor) -> dict[tuple[str, str], torch.Tensor]:
    """Master weights and moments by (kind, parameter), whole in rows, put together of what all ranks say they hold."""
    parts = _everywhere(training_state(actor.parts.train))
    shards: dict[tuple[str, str], dict[int, dict[int, torch.Tensor]]] = {}
    for part in parts:
        for i, held in enumerate(part["spans"]):
            for name, start, stop, at in held:
                flats = {"master": part["master"][i], **{k: v for k, v in part["adam"][i].items() if v.dim()}}
                for kind, flat in flats.items():
                    piece = flat.reshape(-1)[at : at + stop - start]
                    shards.setdefault((kind, name), {}).setdefault(part["tp"][1], {})[start] = piece
    whole = {key: torch.cat([torch.cat([p for _, p in sorted(pieces.items())]) for _, pieces in sorted(slots.items())])
             for key, slots in shards.items()}  # fmt: skip
    return whole | {("step", str(i)): s["step"].reshape(1) for i, s in enumerate(parts[0]["adam"])}


def _same_optimizer(old: dict[tuple[str, str], torch.Tensor], new: dict[tuple[str, str], torch.Tensor], rows: int) -> Any:
    """How many tensors are what they were, how many of these are moments, and what is wrong."""
    wrong = [] if old.keys() == new.keys() else ["other parameters"]
    for (kind, name), value in new.items():
        right = old[kind, name]
        if value.shape != right.shape:  # a vocabulary, with padding
            width = 64
            value, right = value.view(-1, width), right.view(-1, width)[:rows]
            if kind != "master" and bool(value[rows:].any()):
                wrong.append(f"{kind} of new rows of {name}")
            value = value[:rows]
        if not torch.equal(value, right):
            wrong.append(f"{kind} of {name}")
    moving = sum(bool(value.any()) for (kind, _), value in new.items() if kind.startswith("exp_avg"))
    return {"tensors": len(new), "moving": moving, "wrong": wrong}


def _grown(root: Path, train: str, tied: bool) -> dict[str, Any]:
    """A vocabulary of 253 becomes one of 262: weights before and after, then an update and a rollout."""
    config = PPOConfig(batch_size=8, kl_coef=0.1, lr=1e-3)
    actor = Actor(root / ("tied" if tied else "untied"), train=train, gen="tp4", algorithm=config, reference=True)
    names = [f"{train}-{when}" for when in ("before", "after", "learnt")]
    _learn(actor)
    actor.save_hf(root / names[0])
    actor.switch_to_generation()
    errors = [_outcome(lambda: actor.set_tokenizer(Tokens(262)))]
    actor.switch_to_training()
    errors.append(_outcome(lambda: actor.set_tokenizer(Tokens(262 + dist.get_rank()))))
    old = _optimizer(actor)
    actor.set_tokenizer(Tokens(262))
    kept = _same_optimizer(old, _optimizer(actor), 253)
    actor.save_hf(root / names[1])
    same = compare(actor.hybrid.training_fingerprints(), actor.hybrid.training_fingerprints())
    there = actor.switch_to_generation()
    greedy = actor.generate(torch.tensor([[3, 4, 260], [7, 261, 9]]), max_new_tokens=6, temperature=0.0, stop_token_ids=[])
    actor.switch_to_training()
    _learn(actor)
    actor.save_hf(root / names[2])
    out = actor.rollout(torch.tensor([[3, 4, 260]] * 4), max_new_tokens=8)
    actor.update(out.sequences, torch.arange(4.0), out.logprobs)
    return {"names": names, "errors": errors, "same": same, "greedy": greedy.tolist(), "kept": kept,
            "pad": actor.source.pad_token_id, "received": _everywhere(there.bytes_received),
            "vocab": actor.parts.arch.vocab_size}  # fmt: skip
