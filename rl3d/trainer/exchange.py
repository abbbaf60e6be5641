"""The way of the samples: generation replicas -> one canonical global order -> shares of the training ranks.

Samples are keyed by uid. After :func:`exchange` every rank holds the whole step in the order of the prompts, so nothing
downstream depends on how many replicas there were or which finished first; shares of the data-parallel ranks are then
cut from that order (:class:`rl3d.engine.policy.PolicyUpdate`), and TP and PP ranks of a share see the same rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rl3d.data.batch import Prompt, Sample, arrays_to_samples, samples_to_arrays
from rl3d.distributed.groups import ModelGroups
from rl3d.engine.gather import gather_from_replicas


class ExchangeError(RuntimeError):
    """Samples got lost or appeared from nowhere between sampling and training."""


def sample_uid(prompt: Prompt, sample_index: int) -> str:
    """Name of one sample of a prompt within a step."""
    return f"{prompt.uid}-{sample_index}"


def exchange(mine: Iterable[Sample], prompts: Sequence[Prompt], n: int, groups: ModelGroups | None,
             cpu_group: Any) -> list[Sample]:  # fmt: skip
    """All samples of the step on every rank: prompt by prompt, sample by sample. Collective over ``cpu_group``.

    Args:
        mine: scored samples of this replica, in any order.
        prompts: the step's prompts, the same on every rank.
        n: samples per prompt.
        groups: this rank's generation groups (``None`` when it does not generate).

    Raises:
        ExchangeError: on every rank, when a sample is missing or unexpected; names uids.
    """
    # as arrays: a step of long responses is millions of small Python objects otherwise
    replica = {} if groups is None else {groups.dp_rank: samples_to_arrays(list(mine))}
    parts = gather_from_replicas(replica, groups, cpu_group)
    every = [sample for arrays, sidecar in parts.values() for sample in arrays_to_samples(arrays, sidecar)]
    found = {s.uid: s for s in every}
    wanted = [sample_uid(prompt, i) for prompt in prompts for i in range(n)]
    missing, extra = [u for u in wanted if u not in found], sorted(found.keys() - set(wanted))
    if missing or extra or len(every) != len(found):
        raise ExchangeError(
            f"{len(prompts)} prompts x {n} samples: {len(missing)} samples are missing {missing[:4]}, {len(extra)} were "
            f"not asked for {extra[:4]}, {len(every) - len(found)} came twice; a sampling or rewarding flow dropped, "
            f"renamed or repeated them"
        )
    return [found[uid] for uid in wanted]
