"""Light nets: small causal models without attention, whose step costs the same however long the text is.

A folder of one loads wherever foredraft is imported, by transformers' own classes; runtimes do not know it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, final

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from foredraft.models.light.convolution import Convolution
from foredraft.models.light.feed_forward import FeedForward
from foredraft.models.light.linear_attention import LinearAttention

CONVOLUTION, LINEAR_ATTENTION = "convolution", "linear_attention"
# What the layers of a text have read, one entry a layer; each as its mixer keeps it.
States = tuple[Any, ...]


class LightConfig(PretrainedConfig):  # type: ignore[misc]
    """What a light net looks like, in transformers' names where they have one.

    Attributes:
        mixer: How a layer sees the past: convolution or linear_attention.
        kernel_size: Tokens that a convolution sees.
        active_channels: Feed-forward channels kept for each token; 0 keeps all.
    """

    model_type = "foredraft-light"

    def __init__(
        self,
        vocab_size: int = 272,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        mixer: str = CONVOLUTION,
        kernel_size: int = 8,
        active_channels: int = 0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.mixer, self.kernel_size, self.active_channels = mixer, kernel_size, active_channels
        self.rms_norm_eps, self.initializer_range = rms_norm_eps, initializer_range
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


@final
class _Layer(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.mixer_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.mixer = (
            Convolution(hidden, config.kernel_size)
            if config.mixer == CONVOLUTION
            else LinearAttention(hidden, config.num_attention_heads)
        )
        self.feed_forward_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.feed_forward = FeedForward(hidden, config.intermediate_size, config.active_channels)

    def forward(self, x: Float[Tensor, "rows tokens hidden"], state: Any) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.mixer_norm(x), state)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), state


class _LightPreTrained(PreTrainedModel):  # type: ignore[misc]
    config_class = LightConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
            return
        for weight in module.parameters(recurse=False):
            nn.init.normal_(weight, std=self.config.initializer_range)


@final
class LightModel(_LightPreTrained):
    """The body: embeddings, layers, and a final norm."""

    def __init__(self, config: LightConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def read(
        self, token_ids: Int[Tensor, "rows tokens"], states: Sequence[Any] = ()
    ) -> tuple[Float[Tensor, "rows tokens hidden"], States]:
        """Return the final states of tokens behind what `states` have read, and the states behind them.

        Any way of cutting a text into calls gives the same, one token at a time included.
        """
        x = self.embed_tokens(token_ids)
        after = []
        for layer, state in zip(self.layers, states or self._start(len(token_ids)), strict=True):
            x, state = layer(x, state)
            after.append(state)
        return self.norm(x), tuple(after)

    def forward(self, input_ids: Int[Tensor, "rows tokens"], use_cache: bool = False, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.read(input_ids)[0])

    def _start(self, rows: int) -> list[Any]:
        return [layer.mixer.start(rows) for layer in self.layers]


@final
class LightForCausalLM(_LightPreTrained, GenerationMixin):  # type: ignore[misc]
    """A light net with its head."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LightConfig) -> None:
        super().__init__(config)
        self.model = LightModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Int[Tensor, "rows tokens"], **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


AutoConfig.register(LightConfig.model_type, LightConfig)
AutoModel.register(LightConfig, LightModel)
AutoModelForCausalLM.register(LightConfig, LightForCausalLM)
