"""Telling that memory ran out, whichever way it is said."""

import torch

# What PyTorch says where the memory of the machine, not that of a GPU, is at its end: a plain RuntimeError.
_SENTENCES = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in _SENTENCES)
