"""Where a draft starts: cut out of the target, narrowed, healed, sharing its factors, or from elsewhere."""

from foredraft.distill.init.cut import init_from_target, parse_layers
from foredraft.distill.init.head import rank_tokens

__all__ = ["init_from_target", "parse_layers", "rank_tokens"]
