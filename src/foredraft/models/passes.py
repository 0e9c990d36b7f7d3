"""What a forward pass of a model moves and computes, counted from its weights and configuration."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.roofline import PassFacts
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.packed import PackedLinear


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model and how many parameters it holds: of packed integers more than it has entries."""

    tensor: Tensor
    parameters: int

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def stored_weights(model: PreTrainedModel) -> dict[int, Stored]:
    """Return every tensor of a model once, by its address."""
    found = {weight.data_ptr(): Stored(weight, weight.numel()) for weight in model.state_dict().values()}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            packed = module.weight_packed
            found[packed.data_ptr()] = Stored(packed, module.out_features * module.in_features)
            found |= {one.data_ptr(): Stored(one, 0) for one in (module.weight_scale, module.weight_shape)}
    return found


def end_addresses(model: PreTrainedModel) -> tuple[set[int], set[int]]:
    """Return the addresses of the tensors of the table of embeddings and of the head, the same where they are tied."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    table, head = ({weight.data_ptr() for weight in end.parameters()} for end in ends)
    return table, head


def pass_facts(model: PreTrainedModel, head_rows: int = 0, copied_bytes: int = 0) -> PassFacts:
    """Return the facts of one pass.

    Args:
        head_rows: Rows of the head that are computed; 0 for all.
        copied_bytes: Memory of rows of the head that are kept beside the model's own.
    """
    weights = stored_weights(model)
    table, head = end_addresses(model)
    body = [stored for address, stored in weights.items() if address not in table | head]
    all_rows = int(model.get_output_embeddings().out_features)
    share = (head_rows or all_rows) / all_rows
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    attending = 0 if isinstance(model, LightForCausalLM) else layers
    multiplied = sum(stored.parameters for stored in body if stored.tensor.dim() >= 2)
    return PassFacts(
        weight_bytes=sum(stored.bytes for stored in body) + share * sum(weights[one].bytes for one in head),
        resident_bytes=float(sum(stored.bytes for stored in weights.values()) + copied_bytes),
        flops_per_token=2.0 * (multiplied + share * sum(weights[one].parameters for one in head)),
        attention_flops=4.0 * attending * heads * width,
        kv_bytes_per_token=2.0 * attending * kv_heads * width * model.dtype.itemsize,
        layers=layers,
        dtype=str(model.dtype).removeprefix("torch."),
    )
