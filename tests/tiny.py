"""Tiny real models for tests: a byte-level tokenizer with a chat template, and Llama or Qwen2 weights."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = [
    f"{a}{b}" for a in ("sea", "sun", "oak", "red", "owl", "ink", "fog") for b in ("", "s", "dust", "light", "bird")
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 3 special tokens and 256 bytes, and `extra` single tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, *extra])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    num_layers: int = 4,
    hidden: int = 32,
    vocab_size: int = 272,
    seed: int = 0,
    family: str = "llama",
    tied: bool = True,
) -> LlamaForCausalLM | Qwen2ForCausalLM:
    """Return a float32 model with random weights, large enough to have opinions about the next token."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def save_tiny(folder: Path, **options: object) -> Path:
    """Write a tiny model with its tokenizer as an ordinary transformers folder; options as in tiny_model."""
    model = tiny_model(**options)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
