"""Memory in large pages, for work that takes and gives back a parameter's worth of it over and over.

Fresh memory is given to a process page by page, each zeroed in a fault of its own: in pages of 4 KB that takes longer than
hashing what is put there. torch's CPU allocator asks Linux for transparent huge pages, where Linux leaves them to the
program (``madvise``), when ``THP_MEM_ALLOC_ENABLE`` is set as it makes its first tensor; it looks once.
"""

import os
import threading

_SETTING = "THP_MEM_ALLOC_ENABLE"


def use_huge_pages() -> None:
    """Ask for them in a process of our own, before it makes its first tensor. A setting in the environment stays."""
    os.environ.setdefault(_SETTING, "1")


def use_huge_pages_here() -> None:
    """Ask for them in somebody else's process, as far as that is safe, and leave its environment as it was.

    Tensors of 2 MB and more that the process makes from then on lie in large pages, too. Nothing happens where the
    environment has a setting, where the process has made a tensor before (torch does not look again), and where it has other
    threads, which could be reading the environment while it changes.
    """
    if _SETTING in os.environ or threading.active_count() > 1:
        return
    import torch

    os.environ[_SETTING] = "1"
    try:
        torch.empty(1)
    finally:
        del os.environ[_SETTING]
