"""Makes glibc's allocator keep the memory that PyTorch frees."""

from .. import _loading


def keep_memory() -> None:
    """Keeps freed memory in the process, for the next tensors of the same sizes.

    glibc maps every block above 32 MB separately and returns it when it is freed. PyTorch on a CPU then pays for fresh
    pages, each cleared by the kernel, with every large tensor. Training and translation in this package keep memory
    anyway; call this once, early, for models that run in PyTorch itself. `benches/kernels.py` prints the effect.

    This package's operators put large results whose memory is new on large pages, if the system has such pages
    (/sys/kernel/mm/transparent_hugepage/enabled). NORMFORMER_RS_ALLOCATOR=system turns that off.

    The process keeps its peak size, and fragmentation can make it larger. The call cannot be undone. It has no effect
    if NORMFORMER_RS_ALLOCATOR=system is set, or with another allocator than glibc's. If the variable is `return`, the
    call does the opposite: every freed block of 128 KiB or more goes back to the system at once.

    >>> import normformer_rs as nfrs
    >>> nfrs.keep_memory()
    """
    _loading.load().keep_memory()
