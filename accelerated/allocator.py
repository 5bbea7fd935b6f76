"""Keep the C library from handing large freed blocks back to the kernel between training steps."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
LARGEST_INT = 2**31 - 1


def keep_freed_memory():
    """Ask glibc to serve large blocks from its heap and never to trim it; does nothing where there is no glibc.

    A training step frees and allocates the same activations over and over. By default glibc maps each large block anew, and
    the kernel's zeroing of fresh pages then costs more than many of the operations that fill them.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
