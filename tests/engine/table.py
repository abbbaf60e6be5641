"""Runs cases of training on ranks beside their single-process references; shared by the quick and the full table."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.engine.cases import Case
from tests.models import zoo
from tests.ranks import run_ranks
from tests.reference import hf_llama, train_reference


def run_cases(root: Path, nproc: int, cases: Iterable[dict[str, Any]], target: str = "train", timeout: float = 240) -> Any:
    """What ``tests.engine.rank_checks:<target>`` says about ``cases`` (arguments of ``rank_checks.Case``)."""
    cases = list(cases)
    for source, dtype in dict.fromkeys((case.source, case.dtype) for case in (Case(**c) for c in cases)):
        model = zoo.make(source) if source in zoo.MODELS else hf_llama(tied=source == "tied")
        model.save_pretrained(root / source)
        reference = train_reference(source == "tied", model=model, dtype=getattr(torch, dtype))
        torch.save(reference, root / f"{source}-{dtype}.pt")
    return run_ranks(f"tests.engine.rank_checks:{target}", nproc, {"directory": str(root), "cases": cases}, timeout)
