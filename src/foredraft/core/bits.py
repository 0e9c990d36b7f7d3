"""Bits of stored weights as recipes write them: 8, or 4/64 with the inputs that share a scale."""

import re
from collections.abc import Mapping
from typing import Any

_BITS = re.compile(r"(4|8|16)(?:/([1-9][0-9]*))?")
PRESETS = ("chapter",)


def parse_bits(value: Any) -> tuple[int, int]:
    """Return bits and group; 0 where no group is named.

    Raises:
        ValueError: it is neither a number nor bits/group.
    """
    found = _BITS.fullmatch(str(value))
    if not found:
        raise ValueError(f"{value!r} is not known. Known: 4, 8, 16, or with a group, such as 4/64 or 8/32")
    return int(found[1]), int(found[2] or 0)


def checked_plan(value: Any) -> Any:
    """Return a number or preset as it was given, patterns with bits as pairs: their order counts, that of keys is lost.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(value, Mapping | list | tuple):
        try:
            pairs = [(str(pattern), one) for pattern, one in dict(value).items()]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{value!r} is not known. Patterns stand with their bits: {{head: 4, layers.*: 8}}"
            ) from error
        for _, one in pairs:
            parse_bits(one)
        return pairs
    if value not in PRESETS:
        parse_bits(value)
    return value
