"""Memory in large pages, for work that takes and gives back a parameter's worth of it over and over."""

import os


def use_huge_pages() -> None:
    """Ask torch's CPU allocator for transparent huge pages, where Linux leaves them to the program (``madvise``).

    Fresh memory is given to a process page by page, each zeroed in a fault of its own: in pages of 4 KB that takes longer
    than hashing what is put there. To be called before the process makes its first tensor; torch looks once. A setting
    of ``THP_MEM_ALLOC_ENABLE`` in the environment stays as it is.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
