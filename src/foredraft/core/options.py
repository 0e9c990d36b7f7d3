"""Options written behind a name: `decay:rate=0.99`, `tree:max_nodes=16,drawn=true`."""

from collections.abc import Mapping
from typing import Any

from foredraft.core.errors import UserError

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
_WORDS = {"true": True, "false": False}


def read_options(spec: str, takes: Mapping[str, type]) -> dict[str, Any]:
    """Return the options of `name:option=value,...` in their kinds.

    Args:
        takes: Kind of each option that may be given: int, float, bool or str.

    Raises:
        UserError: an option that is not taken, or a value of another kind.
    """
    name, _, written = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, written.split(",")):
        option, _, value = part.partition("=")
        if option not in takes:
            raise UserError(f"{spec}: {name} takes {', '.join(takes) or 'no options'}, not {option!r}.")
        kind = takes[option]
        try:
            options[option] = _WORDS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise UserError(f"{spec}: {option} is {_KINDS[kind]}, not {value!r}.") from None
    return options
