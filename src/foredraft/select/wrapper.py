"""The adaptive drafter as a way of drafting: `draft+adaptive:others=prompt-lookup|suffix-automaton`."""

from collections.abc import Callable

from foredraft.core.errors import UserError
from foredraft.core.protocols import Drafter
from foredraft.select.adaptive import AdaptiveDrafter, Portfolio
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import read_policy

_MODEL_FREE_RATIO = 0.002
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def adaptive(
    drafter: Drafter,
    load: Callable[[str], Drafter],
    others: str = "",
    policy: str = "hedge",
    lengths: str = "2-4-8",
    cost_ratio: float = 0.2,
    target_growth: float = 0.05,
    seed: int = 0,
) -> AdaptiveDrafter:
    """Return what `+adaptive:...` makes of a drafter: it, `others` (specs with | between), or none, for each block.

    Args:
        policy: Its name, and its options with ; between: `score:speed=1;quality=0.2`. `foredraft select --simulate`
            compares policies.
        lengths: Draft lengths with - between; --k must allow the longest.
        cost_ratio: Time of a draft step of a model / of a target step.
        target_growth: What one more token adds to a target step, as a share of it; of several requests decoded
            together the tokens of all count.

    Raises:
        UserError: lengths that are none, or costs that are negative.
    """
    specs = [spec for spec in others.split("|") if spec]
    names = [drafter.kind, *specs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"+adaptive: {twice[0]} stands twice: name each drafter once.")
    named = {drafter.kind: drafter} | {spec: load(spec) for spec in specs}
    try:
        wanted = tuple(int(part) for part in lengths.split("-"))
    except ValueError:
        raise UserError(f"+adaptive: lengths are numbers with - between, such as 2-4-8, not {lengths!r}.") from None
    ratios = [cost_ratio if one.num_parameters else _MODEL_FREE_RATIO for one in named.values()]
    longest = max(wanted, default=0)
    costs = {requests: BlockCosts.by_ratio(ratios, longest, target_growth, requests) for requests in _REQUESTS}
    return AdaptiveDrafter(Portfolio(named, wanted, costs, read_policy(policy), seed=seed), drafter.law)
