"""What a forward pass of a model moves and computes, counted from its weights and configuration."""

from transformers import PreTrainedModel

from foredraft.core.roofline import PassFacts


def pass_facts(model: PreTrainedModel, head_rows: int = 0, copied_bytes: int = 0) -> PassFacts:
    """Return the facts of one pass.

    Args:
        head_rows: Rows of the head that are computed; 0 for all.
        copied_bytes: Memory of rows of the head that are kept beside the model's own.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = {weight.data_ptr(): weight for weight in model.state_dict().values()}
    resident = sum(weight.numel() * weight.element_size() for weight in weights.values())
    body = [weight for pointer, weight in weights.items() if pointer not in (table.data_ptr(), head.data_ptr())]
    rows = (head_rows or head.shape[0]) * head.shape[1]
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    return PassFacts(
        weight_bytes=float(sum(weight.numel() * weight.element_size() for weight in body) + rows * head.element_size()),
        resident_bytes=float(resident + copied_bytes),
        flops_per_token=2.0 * (sum(weight.numel() for weight in body if weight.dim() >= 2) + rows),
        attention_flops=4.0 * layers * heads * width,
        kv_bytes_per_token=2.0 * layers * kv_heads * width * model.dtype.itemsize,
        layers=layers,
        dtype=str(model.dtype).removeprefix("torch."),
    )
