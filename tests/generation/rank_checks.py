"""Runs on several ranks: carries out engine jobs and returns their results (see test_megatron.py)."""

from typing import Any

import torch.distributed as dist

from rl3d.distributed.groups import GroupRegistry, generation_groups
from rl3d.generation import filters
from rl3d.generation.engine import GenerationError, Progress, Request, Result, SamplingParams
from rl3d.layout import GenMesh
from tests.generation.models import Job, build_engine


def main(runtime: Any, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    registry = GroupRegistry(runtime.timeout_s)
    ranks = tuple(range(runtime.world_size))
    groups = {tp: generation_groups(GenMesh(tp, ranks).groups(), registry) for tp in (1, 2, 4)}
    answers = [_carry_out(Job.from_json(data), groups) for data in jobs]
    model = jobs[0]["model"]
    return {"jobs": answers, "disagreement": _disagreement(model, groups[4]), "abort": _abort(model, groups[4])}


def _carry_out(job: Job, groups: dict[int, Any]) -> list[dict[str, Any]]:
    mine = groups[job.tp]
    filters._HEAD = job.engine.pop("head", 1024)
    engine = build_engine(job.model, mine, **job.engine)
    share = list(range(len(job.requests)))
    if job.split:
        share = share[mine.dp_rank :: mine.dp_size]
    streamed: list[Result] = []
    results = engine.generate([job.requests[i] for i in share], streamed.append)
    assert sorted(map(id, streamed)) == sorted(map(id, results)), "on_finish saw other results than were returned"
    plain = [{**vars(r), "request_index": share[r.request_index]} for r in results]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine.dp_rank, plain))
    by_replica: dict[int, Any] = {}
    for replica, answer in everyone:
        assert by_replica.setdefault(replica, answer) == answer, "the ranks of a replica disagree"
    if not job.split:
        return by_replica[0]
    merged = [r for answer in by_replica.values() for r in answer]
    return sorted(merged, key=lambda r: (r["request_index"], r["sample_index"]))


def _disagreement(model: str, groups: Any) -> str:
    """Different requests on the ranks of one replica are an error on all of them, not a hang."""
    engine = build_engine(model, groups)
    try:
        engine.generate([Request([3 + groups.tp_rank // 2], SamplingParams(4))])
    except GenerationError as error:
        return str(error)
    return ""


def _abort(model: str, groups: Any) -> list[list[Any]]:
    """One rank of the replica aborts; all must stop the request at the same step."""
    engine = build_engine(model, groups)

    def step(progress: Progress) -> None:
        if groups.tp_rank == 2 and progress.tokens == 6:
            engine.abort("cut")

    requests = [Request([3, 4 + i], SamplingParams(40), (0, i, 0), name) for i, name in enumerate(("cut", "keep"))]
    mine = [[r.finish_reason, r.token_ids] for r in engine.generate(requests, on_step=step)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone)
    return mine
