"""From occurrences to a draft: each earlier occurrence votes for the tokens that followed it.

An occurrence is a row: the length of its match with the context, and the tokens that followed; a row of length 0 has
no vote. A row counts `scale` * base**length votes. A token's share of the votes, with an abstention `doubt` added to
the total, is the confidence of that branch.
"""

import numpy as np
from jaxtyping import Float64, Int64

from foredraft.ngram.jit import jit

ROOT = -1


@jit
def vote_chain(
    lengths: Int64[np.ndarray, " rows"],
    scales: Float64[np.ndarray, " rows"],
    powers: Float64[np.ndarray, " longest"],
    tokens: Int64[np.ndarray, "rows k"],
    doubt: float,
    least_confidence: float,
    draft: Int64[np.ndarray, " k"],
) -> int:
    """Write the most voted chain into `draft` and return its length.

    Rows that disagree with a token drop out of the vote on those behind it. Ends where no row has a token, or
    where the confidence of the whole chain would fall below `least_confidence`.

    Args:
        powers: base**length, for lengths from 0 up to the longest that counts for more.
    """
    rows, weights = _voters(lengths, scales, powers)
    candidates, votes = np.empty(len(rows), np.int64), np.empty(len(rows))
    num_rows, confidence = len(rows), 1.0
    for offset in range(len(draft)):
        num_candidates, total, best = 0, 0.0, 0
        for index in range(num_rows):
            token = tokens[rows[index], offset]
            if token < 0:
                continue
            total += weights[index]
            candidate = 0
            while candidate < num_candidates and candidates[candidate] != token:
                candidate += 1
            if candidate == num_candidates:
                candidates[candidate], votes[candidate] = token, 0.0
                num_candidates += 1
            votes[candidate] += weights[index]
            if votes[candidate] > votes[best]:
                best = candidate
        if num_candidates == 0:
            return offset
        confidence *= votes[best] / (total + doubt)
        if confidence < least_confidence:
            return offset
        draft[offset] = candidates[best]
        kept = 0
        for index in range(num_rows):
            if tokens[rows[index], offset] == candidates[best]:
                rows[kept], weights[kept] = rows[index], weights[index]
                kept += 1
        num_rows = kept
    return len(draft)


@jit
def vote_tree(
    lengths: Int64[np.ndarray, " rows"],
    scales: Float64[np.ndarray, " rows"],
    powers: Float64[np.ndarray, " longest"],
    tokens: Int64[np.ndarray, "rows k"],
    doubt: float,
    least_confidence: float,
    draft: Int64[np.ndarray, " nodes"],
    parents: Int64[np.ndarray, " nodes"],
) -> int:
    """Write the most confident tree of at most len(draft) nodes, parents first; return its number of nodes.

    Grows by the open branch with the largest confidence, the product of its shares from the root.
    """
    rows, weights = _voters(lengths, scales, powers)
    num_rows = len(rows)
    most = (len(draft) + 1) * num_rows
    branch_token, branch_parent, branch_confidence = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most)
    branch_rows = np.zeros((most, num_rows), np.bool_)
    depth = np.zeros(len(draft) + 1, np.int64)
    alive = np.ones(num_rows, np.bool_)
    num_branches, node, confidence, nodes, offset = 0, ROOT, 1.0, 0, 0
    while True:
        opened, total = num_branches, 0.0
        for index in range(num_rows):
            if not alive[index] or offset >= tokens.shape[1] or tokens[rows[index], offset] < 0:
                continue
            token = tokens[rows[index], offset]
            total += weights[index]
            branch = opened
            while branch < num_branches and branch_token[branch] != token:
                branch += 1
            if branch == num_branches:
                branch_token[branch], branch_parent[branch] = token, node
                branch_confidence[branch] = 0.0
                num_branches += 1
            branch_confidence[branch] += weights[index]
            branch_rows[branch, index] = True
        for branch in range(opened, num_branches):
            branch_confidence[branch] *= confidence / (total + doubt)
        if num_branches == 0 or nodes == len(draft):
            return nodes
        best = np.argmax(branch_confidence[:num_branches])
        confidence = branch_confidence[best]
        if confidence <= 0.0 or confidence < least_confidence:
            return nodes
        branch_confidence[best] = -1.0
        draft[nodes], parents[nodes] = branch_token[best], branch_parent[best]
        offset = 1 if branch_parent[best] == ROOT else depth[branch_parent[best]] + 1
        depth[nodes], node, alive = offset, nodes, branch_rows[best]
        nodes += 1


@jit
def _voters(
    lengths: np.ndarray, scales: np.ndarray, powers: np.ndarray
) -> tuple[Int64[np.ndarray, " voters"], Float64[np.ndarray, " voters"]]:
    """Return the rows that have a vote, and how much each counts."""
    rows, weights = np.empty(len(lengths), np.int64), np.empty(len(lengths))
    found = 0
    for row in range(len(lengths)):
        if lengths[row] > 0:
            rows[found], weights[found] = row, scales[row] * powers[min(lengths[row], len(powers) - 1)]
            found += 1
    return rows[:found], weights[:found]
