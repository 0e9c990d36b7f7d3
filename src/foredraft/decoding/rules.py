"""Acceptance rules: how many draft tokens of a block stand, and which token follows them.

Every rule keeps the target's law exactly (MATHS 1 and 2). Chance enters as a function that returns fresh
uniforms in [0, 1), so that a test can enumerate every outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.core.law import sample_index
from foredraft.core.proposal import Proposal

Uniform = Callable[[], float]

_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a block.

    Attributes:
        num_accepted: Draft tokens that stand.
        next_token: The token after them: from the residual, or the bonus when all stand.
    """

    num_accepted: int
    next_token: int


Rule = Callable[[Tensor, Proposal, Uniform], Verdict]


def verify_chain(target_probs: Float[Tensor, "positions vocab"], proposal: Proposal, uniform: Uniform) -> Verdict:
    """Test a chain token by token and draw the token that follows the accepted ones.

    Args:
        target_probs: The target's processed law before each draft token, and after the last.
        proposal: A chain of k tokens; none gives one token of the target.
        uniform: Returns a fresh uniform in [0, 1) at each call.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318).
    """
    for index, token_id in enumerate(proposal.token_ids.tolist()):
        if not uniform() < acceptance_probability(target_probs[index], proposal, index, token_id):
            rest = residual(target_probs[index], proposal.laws.probs(index, token_id))
            return Verdict(index, sample_index(rest, uniform()))
    return Verdict(len(proposal), sample_index(target_probs[len(proposal)], uniform()))


def verify_block(target_probs: Float[Tensor, "positions vocab"], proposal: Proposal, uniform: Uniform) -> Verdict:
    """Test a chain as a whole: the longest prefix that passes its own test stands.

    Keeps the target's law as verify_chain does, and accepts at least as many tokens on average. Arguments as
    there; k uniforms are drawn for the tests, one for the token that follows.

    Source: Sun et al. 2025 (arXiv 2403.10444), Algorithm 2.
    """
    k, accepted, carried = len(proposal), 0, 1.0
    rest = target_probs[0] if k == 0 else residual(target_probs[0], _law(proposal, 0))
    for index, token_id in enumerate(proposal.token_ids.tolist()):
        draft = float(_law(proposal, index)[token_id])
        carried = min(1.0, carried * float(target_probs[index, token_id]) / draft)
        if index + 1 == k:
            over, chance = target_probs[k], carried
        else:
            over = (carried * target_probs[index + 1] - _law(proposal, index + 1)).clamp(min=0.0)
            mass = float(over.sum())
            chance = mass / (mass + 1.0 - carried) if mass > 0.0 else 0.0
        if uniform() < chance:
            accepted, rest = index + 1, over
    return Verdict(accepted, sample_index(rest, uniform()))


def acceptance_probability(
    target_probs: Float[Tensor, " vocab"], proposal: Proposal, index: int, token_id: int
) -> float:
    """Return min(1, target(x) / draft(x)) for draft token `index`, in [0, 1]."""
    target = float(target_probs[token_id])
    if proposal.laws.is_one_hot(index):
        return min(1.0, target)
    draft = float(proposal.laws.probs(index, token_id)[token_id])
    if draft <= 0.0:
        raise DrafterError(f"The drafter proposed token {token_id} to which its own law gives no chance.")
    return min(1.0, target / draft)


def residual(target_probs: Float[Tensor, " vocab"], draft_probs: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Return max(0, target - draft) over the whole vocabulary, not normalised.

    Where rounding leaves nothing, the two laws are equal and the target's is returned.
    """
    rest = (target_probs - draft_probs).clamp(min=0.0)
    return rest if bool(rest.any()) else target_probs


def _law(proposal: Proposal, index: int) -> Float[Tensor, " vocab"]:
    return proposal.laws.probs(index, int(proposal.token_ids[index]))


def check_proposal(proposal: Proposal, k: int, vocab_size: int) -> None:
    """Refuse a proposal that no rule can keep lossless.

    Raises:
        DrafterError: more tokens than asked, an id outside the vocabulary, laws of another width, or a
            law that does not sum to one.
    """
    if len(proposal) > k:
        raise DrafterError(f"The drafter proposed {len(proposal)} tokens where at most {k} were asked.")
    if len(proposal) == 0:
        return
    low, high = int(proposal.token_ids.min()), int(proposal.token_ids.max())
    if low < 0 or high >= vocab_size:
        raise DrafterError(
            f"The drafter proposed token {low if low < 0 else high}; the target's ids end at {vocab_size - 1}."
        )
    dense = proposal.laws.dense
    if dense.shape[0] == 0:
        return
    if dense.shape[1] != vocab_size:
        raise DrafterError(f"The drafter's laws are {dense.shape[1]} tokens wide, the target's {vocab_size}.")
    mass = dense.sum(-1)
    wrong = ~((mass - 1.0).abs() <= _MASS_TOLERANCE) | (dense < 0.0).any(-1)
    if bool(wrong.any()):
        row = int(torch.nonzero(wrong)[0])
        raise DrafterError(f"The drafter's law {row} is none: it sums to {float(mass[row]):.6g}, not to 1.")
