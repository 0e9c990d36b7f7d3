"""Keeping bitsandbytes' 4-bit layers as they are stored.

bitsandbytes 0.50 packs NF4 weights anew at the first pass on processors with AVX512-BF16, and what it then saves is
damaged: the scales come back transposed. Layers that are told not to use that path are saved as they were loaded.
"""

from transformers import PreTrainedModel


def keep_packing(model: PreTrainedModel) -> PreTrainedModel:
    """Tell every 4-bit layer of a model, in place, to stay as it is stored; return the model."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False
    return model
