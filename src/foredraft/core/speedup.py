"""Speedup by formula (MATHS 6). `cost_ratio` is rho, the time of one draft step / one target step of one token;
`overhead` is the time of a block beside drafting and verifying / the same; both are >= 0.
"""

import math
from collections.abc import Callable, Sequence

_LONGEST = 1024
_HALVINGS = 60


def expected_tokens_per_call(acceptance: float, k: int) -> float:
    """Return the mean tokens per call where every draft token is accepted with the same chance, in [1, k + 1].

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return float(k + 1) if acceptance == 1.0 else (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def tokens_per_call_by_position(acceptance_by_position: Sequence[float]) -> float:
    """Return 1 + sum over i of the product of the first i entries: exact but for blocks cut by an answer's end."""
    reached, tokens = 1.0, 1.0
    for acceptance in acceptance_by_position:
        reached *= acceptance
        tokens += reached
    return tokens


def expected_speedup(acceptance: float, k: int, cost_ratio: float, overhead: float = 0.0) -> float:
    """Return the expected wall-clock speedup over plain decoding.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.8; assumes that verifying k + 1 positions takes
    as long as one, and that draft tokens are accepted independently with the same chance.
    """
    return expected_tokens_per_call(acceptance, k) / (1.0 + k * cost_ratio + overhead)


def accepted_moments(acceptance: float, k: int) -> tuple[float, float]:
    """Return E[N] and E[N^2] of the draft tokens accepted in a block of k, independent and alike."""
    first = sum(acceptance**i for i in range(1, k + 1))
    return first, sum((2 * i - 1) * acceptance**i for i in range(1, k + 1))


def expected_accepted_decaying(first: float, decay: float, k: int) -> float:
    """Return E[N] where the i-th draft token is accepted with chance first * decay^(i-1)."""
    return sum(first**i * decay ** (i * (i - 1) / 2) for i in range(1, k + 1))


def best_length(acceptance: float, cost_ratio: float, overhead: float = 0.0) -> int:
    """Return the draft length with the largest expected_speedup; 0 where drafting does not pay.

    The stationary point of the formula over real lengths is the root of
    acceptance^(k+1) * (r + (1 + k r) ln(1 / acceptance)) = r with r = cost_ratio / (1 + overhead); the best
    integer lies beside it.

    Args:
        acceptance: In [0, 1).
        cost_ratio: > 0.
    """
    if acceptance <= 0.0:
        return 0
    ratio, slope = cost_ratio / (1.0 + overhead), math.log(1.0 / acceptance)
    low, high = 0.0, float(_LONGEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rising = acceptance ** (middle + 1) * (ratio + (1 + middle * ratio) * slope) > ratio
        low, high = (middle, high) if rising else (low, middle)
    best = max((math.floor(low), math.ceil(low)), key=lambda k: expected_speedup(acceptance, k, cost_ratio, overhead))
    return best if expected_speedup(acceptance, best, cost_ratio, overhead) > 1.0 else 0


def best_length_marginal(
    acceptance_by_position: Sequence[float],
    cost_ratio: float,
    target_time: Callable[[int], float],
    overhead: float = 0.0,
) -> int:
    """Return the draft length at which one more draft token costs more than it brings.

    Lengthens while A_{k+1} > (rho + growth of the target step) * speedup(k), A_i the product of the first i
    entries. Right for acceptance that does not rise with the position.

    Args:
        acceptance_by_position: Of the longest draft to consider.
        target_time: Time of a target step over n tokens / one over one token.
    """
    reached, tokens, best = 1.0, 1.0, 0
    for k, acceptance in enumerate(acceptance_by_position):
        reached *= acceptance
        speedup = tokens / (k * cost_ratio + target_time(k + 1) + overhead * (k > 0))
        added = cost_ratio + target_time(k + 2) - target_time(k + 1) + overhead * (k == 0)
        if reached <= added * speedup:
            break
        tokens, best = tokens + reached, k + 1
    return best


def break_even_acceptance(k: int, block: float) -> float:
    """Return the acceptance, the same for every token, from which on blocks of k pay; 1 where none does.

    Args:
        block: Time of a whole block / one plain target step.
    """
    if block >= k + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_per_call(middle, k) < block else (low, middle)
    return high


def cascade_speedup(
    mean_tokens_per_call: float, k: int, cost_ratio: float, draft_speedup: float, overhead: float = 0.0
) -> float:
    """Return the speedup where the draft itself is made `draft_speedup` times faster; never the product of the two."""
    return mean_tokens_per_call / (1.0 + k * cost_ratio / draft_speedup + overhead)
