"""Light nets with random weights, between the target's own embeddings and head."""

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from foredraft.models.light.model import LightConfig, LightForCausalLM


@dataclass(frozen=True, slots=True)
class LightShape:
    """What a new net looks like; see LightConfig."""

    mixer: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    kernel: int
    active: int


def light_net(target: PreTrainedModel, shape: LightShape, generator: torch.Generator) -> LightForCausalLM:
    """Return a new net for the target's tokens, every matrix drawn by `generator`."""
    text = target.config.get_text_config()
    config = LightConfig(
        vocab_size=target.get_input_embeddings().weight.shape[0],
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        mixer=shape.mixer,
        kernel_size=shape.kernel,
        active_channels=shape.active,
        initializer_range=getattr(text, "initializer_range", 0.02),
        tie_word_embeddings=bool(text.tie_word_embeddings),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        model = LightForCausalLM(config).to(target.dtype).to(target.device).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * config.initializer_range)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model
