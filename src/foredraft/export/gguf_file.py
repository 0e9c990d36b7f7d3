"""A causal language model as one GGUF file, opened again after it was written."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from transformers import PreTrainedModel

from foredraft.export.gguf_tensors import TYPES, StoredTensor, head_size, refuse_other_models, stored_tensors
from foredraft.export.gguf_vocabulary import Field
from foredraft.export.reopen import changed

_FORMAT = 2  # general.quantization_version of ggml


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    vocabulary: Sequence[Field],
    name: str,
    licence: str = "",
    default: str = "f16",
    types: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write a model with its tokenizer; return the type of every tensor, by llama.cpp's names.

    The file is opened again and each tensor compared with what was to be written.

    Args:
        vocabulary: See gguf_vocabulary.vocabulary_fields.
        name: What the file calls the model.
        default, types: See gguf_tensors.stored_tensors.

    Raises:
        UserError, ModelError: see gguf_tensors.stored_tensors.
        CheckpointError: the file does not hold what was to be written.
    """
    refuse_other_models(model)
    writer = GGUFWriter(path, model.config.model_type)
    for field in _general(name, licence, TYPES[default][1]):
        field.write(writer)
    for field in _sizes(model):
        field.write(writer)
    for field in vocabulary:
        field.write(writer)
    tensors = list(stored_tensors(model, default, types or {}))
    for tensor in tensors:
        kind = TYPES[tensor.type][0]
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind if tensor.data.dtype == np.uint8 else None)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    refuse_changed_file(path, tensors)
    return {tensor.name: tensor.type for tensor in tensors}


def refuse_changed_file(path: Path, tensors: Sequence[StoredTensor]) -> None:
    """Compare the tensors of a GGUF file with those that were to be written.

    Raises:
        CheckpointError: names the first that is missing, extra or different.
    """
    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for tensor in tensors:
        held = found.pop(tensor.name, None)
        if held is None:
            raise changed(path, f"{tensor.name} is missing")
        kind = TYPES[tensor.type][0]
        shape = tuple(int(size) for size in reversed(held.shape))
        wanted = tensor.data if tensor.data.dtype != np.uint8 else dequantize(tensor.data, kind)
        values = dequantize(held.data, held.tensor_type).reshape(shape)
        if held.tensor_type != kind or shape != tensor.weights.shape or not np.array_equal(values, wanted):
            raise changed(path, f"{tensor.name} differs")
    if found:
        raise changed(path, f"{min(found)} is no tensor of the model")


def _general(name: str, licence: str, file_type: int) -> Iterator[Field]:
    text, number = GGUFValueType.STRING, GGUFValueType.UINT32
    yield Field("general.type", "model", text)
    yield Field("general.name", name, text)
    if licence:
        yield Field("general.license", licence, text)
    yield Field("general.file_type", file_type, number)
    yield Field("general.quantization_version", _FORMAT, number)


def _sizes(model: PreTrainedModel) -> Iterator[Field]:
    config, wide = model.config, head_size(model)
    whole = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": wide,
        "vocab_size": config.vocab_size,
    }
    if wide * config.num_attention_heads != config.hidden_size:
        whole |= {"attention.key_length": wide, "attention.value_length": wide}
    real = {
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    for key, size in whole.items():
        yield Field(f"{config.model_type}.{key}", int(size), GGUFValueType.UINT32)
    for key, value in real.items():
        yield Field(f"{config.model_type}.{key}", float(value), GGUFValueType.FLOAT32)
