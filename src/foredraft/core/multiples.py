"""Widths that runtimes load well, and widths that they refuse.

Multiples as their kernels and formats state them: K-quants of llama.cpp hold blocks of 256 inputs, Q4_0 and Q8_0 of 32;
4-bit kernels of vLLM (Marlin) take inputs in multiples of 128 and outputs of 64. Nothing here has run a runtime.
"""

from collections.abc import Mapping

MULTIPLES: Mapping[str, int] = {"transformers": 1, "openvino": 32, "llama.cpp": 256, "llama.cpp-q8_0": 32, "vllm": 128}
# Classes that take the size of a head from hidden_size / num_attention_heads, whatever the configuration says.
_IMPLIED_HEAD_SIZE = {"vllm": ("qwen2",), "llama.cpp": ("qwen2",), "llama.cpp-q8_0": ("qwen2",)}


def rounded_width(width: int, runtime: str, most: int) -> int:
    """Return the next multiple that a runtime asks for, or `most` before it; a width beyond `most` stays."""
    multiple = MULTIPLES.get(runtime, 1)
    return max(width, min(-(-width // multiple) * multiple, most))


def refuses_head_size(runtime: str, model_type: str, hidden: int, heads: int, head_dim: int) -> bool:
    """Return whether a runtime would take the heads of such a model for wider or narrower than they are."""
    return model_type in _IMPLIED_HEAD_SIZE.get(runtime, ()) and hidden != heads * head_dim
