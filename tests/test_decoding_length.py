"""Draft lengths that follow the acceptance seen so far."""

from foredraft.decoding.length import Fallback, FixedLength, LengthPolicy, MarginalLength, WindowLength


def feed(policy: LengthPolicy, blocks: int, accept_all: bool) -> int:
    for _ in range(blocks):
        k = policy.next_length()
        policy.observe(min(1, k) if not accept_all else k, k if accept_all else 0)
    return policy.next_length()


def test_the_window_lengthens_above_85_and_shortens_below_60_percent() -> None:
    policy = WindowLength(3, 5, window=4)
    assert feed(policy, 3, accept_all=True) == 3
    assert feed(policy, 1, accept_all=True) == 4
    assert feed(policy, 20, accept_all=True) == 5
    assert feed(policy, 4, accept_all=False) == 4
    assert feed(policy, 40, accept_all=False) == 1


def test_the_window_rests_between_its_thresholds() -> None:
    policy = WindowLength(4, 8, window=2)
    for _ in range(10):
        policy.observe(4, 3)
    assert policy.next_length() == 4


def test_the_marginal_rule_drafts_as_far_as_acceptance_pays() -> None:
    always, never = (MarginalLength(8, 0.2, lambda width: 1.0) for _ in range(2))
    assert feed(always, 60, accept_all=True) == 8
    assert feed(never, 60, accept_all=False) == 1
    costly = MarginalLength(8, 0.2, lambda width: 1.0 + 0.9 * (width - 1))
    assert feed(costly, 60, accept_all=True) < 8


def test_fallback_decodes_plainly_for_a_while_after_failed_blocks() -> None:
    policy = Fallback(FixedLength(3), after=2, pause=3)
    lengths = []
    for _ in range(8):
        lengths.append(policy.next_length())
        policy.observe(min(1, lengths[-1]), 0)
    assert lengths == [3, 3, 0, 0, 0, 3, 3, 0]
    policy = Fallback(FixedLength(3), after=2, pause=3)
    for accepted in (0, 1, 0, 1, 0):
        assert policy.next_length() == 3
        policy.observe(1 + accepted, accepted)
