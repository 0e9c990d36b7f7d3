"""How long a draft may be, wherever a length is asked for."""

LONGEST_DRAFT = 64  # tokens of a block
