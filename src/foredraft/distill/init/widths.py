"""Widths that a plain configuration can say: hidden channels, attention heads, feed-forward channels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from foredraft.core.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Widths:
    """What is asked for; 0 keeps what the model has."""

    hidden: int = 0
    heads: int = 0
    ffn: int = 0

    @property
    def given(self) -> bool:
        return any((self.hidden, self.heads, self.ffn))


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a decoder.

    Attributes:
        group: Attention heads that read one key-value head.
    """

    hidden: int
    heads: int
    group: int
    head_dim: int
    ffn: int

    @staticmethod
    def of(config: PretrainedConfig) -> "Shape":
        """Return the widths that a configuration states or implies."""
        config = config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return Shape(config.hidden_size, heads, heads // kv_heads, head_dim, config.intermediate_size)


def narrowed_shape(shape: Shape, widths: Widths) -> Shape:
    """Return the shape of a model of `shape` that was narrowed to `widths`.

    Heads go in whole groups around a key-value head. Transformers and other runtimes ask that the hidden size
    be a multiple of the number of heads, whatever the size of a head.

    Raises:
        RecipeError: a width that the model does not have or that breaks the grouping; names the nearest that do not.
    """
    hidden, heads, ffn = widths.hidden or shape.hidden, widths.heads or shape.heads, widths.ffn or shape.ffn
    for name, asked, most in (("hidden", hidden, shape.hidden), ("heads", heads, shape.heads), ("ffn", ffn, shape.ffn)):
        if asked > most:
            raise RecipeError(f"{name}: {asked} is more than the {most} of the model that is narrowed.")
    if heads % shape.group:
        valid = _nearest(heads, range(shape.group, shape.heads + 1, shape.group), lambda count: hidden % count == 0)
        raise RecipeError(
            f"heads: {heads} breaks the grouping, {shape.group} attention heads to a key-value head. Nearest: {valid}."
        )
    if hidden % heads:
        wide = _nearest(hidden, range(heads, shape.hidden + 1, heads), lambda _: True)
        many = _nearest(heads, range(shape.group, shape.heads + 1, shape.group), lambda count: hidden % count == 0)
        raise RecipeError(
            f"hidden: {hidden} is no multiple of {heads} heads. Nearest hidden for {heads} heads: {wide}; nearest "
            f"heads for hidden {hidden}: {many}."
        )
    return Shape(hidden, heads, shape.group, shape.head_dim, ffn)


def _nearest(asked: int, candidates: Sequence[int], fits: Callable[[int], bool]) -> str:
    valid = [count for count in candidates if fits(count)]
    below, above = [count for count in valid if count < asked], [count for count in valid if count > asked]
    return " or ".join(str(count) for count in (*below[-1:], *above[:1])) or "none"
