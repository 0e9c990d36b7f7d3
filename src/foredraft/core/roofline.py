"""The time of one forward pass from what it moves and computes: a prediction for machines that are not here.

Source: Williams, Waterman and Patterson 2009, "Roofline"; the fixed costs of a pass and of a layer, which matter for
small drafts, are added here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What one forward pass of a model moves and computes.

    Attributes:
        weight_bytes: Read by every pass: all layers and the rows of the head that are computed. The table of
            embeddings is left out, of which a pass reads a row a token; a head that is tied to it counts once.
        resident_bytes: Weights held in memory, the table of embeddings included.
        flops_per_token: Two for each weight that is multiplied. Of mixtures of experts all experts count, which is
            too much for few tokens.
        attention_flops: For each new token and each token that it looks at.
        kv_bytes_per_token: Keys and values of a token of the context, over all layers.
        layers: Decoder layers.
        dtype: What it computes in, such as float32.
    """

    weight_bytes: float
    resident_bytes: float
    flops_per_token: float
    attention_flops: float
    kv_bytes_per_token: float
    layers: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine sustains, efficiency included.

    Attributes:
        bandwidth: Bytes/s from memory.
        batch_bandwidth: Bytes/s of weights where a pass reads more than one position. Smaller than bandwidth where a
            library copies the matrix into another order first, as those of processors do.
        flops: FLOP/s by dtype.
        memory: Bytes for weights and contexts.
        watts: Power while it decodes.
        overlap: Share of the shorter of moving and computing that hides behind the longer; 1 is the roofline.
        pass_seconds, layer_seconds: Fixed costs of a pass and of each of its layers.
    """

    bandwidth: float
    batch_bandwidth: float
    flops: dict[str, float]
    memory: float
    watts: float
    overlap: float
    pass_seconds: float
    layer_seconds: float

    def flops_in(self, dtype: str) -> float:
        """Return FLOP/s in `dtype`; in the slowest one known where that is not."""
        return self.flops.get(dtype, min(self.flops.values()))


def pass_seconds(facts: PassFacts, machine: Machine, rows: int, tokens: int, context: int) -> float:
    """Return the time of one pass over `tokens` new tokens of each of `rows` texts.

    The longer of moving (weights once, keys and values of every row) and computing, what does not hide of the
    shorter, and the fixed costs.

    Args:
        context: Tokens of each text that were read before.
    """
    weights = facts.weight_bytes / (machine.bandwidth if rows * tokens == 1 else machine.batch_bandwidth)
    moved = weights + rows * (context + tokens) * facts.kv_bytes_per_token / machine.bandwidth
    looked_at = context + (tokens + 1) / 2  # mean over the new tokens
    operations = rows * tokens * (facts.flops_per_token + looked_at * facts.attention_flops)
    computed = operations / machine.flops_in(facts.dtype)
    fixed = machine.pass_seconds + facts.layers * machine.layer_seconds
    return max(moved, computed) + (1.0 - machine.overlap) * min(moved, computed) + fixed


def block_seconds(facts: PassFacts, machine: Machine, rows: int, k: int, context: int) -> float:
    """Return the time of drafting k tokens for each of `rows` texts, one pass a token.

    The first pass reads two tokens, since the last draft token of a block was not read when it was accepted.
    """
    first = pass_seconds(facts, machine, rows, 2, context)
    return first + (k - 1) * pass_seconds(facts, machine, rows, 1, context)


def needed_bytes(facts: PassFacts, rows: int, tokens: int) -> float:
    """Return the memory of a model that serves `rows` texts of `tokens` tokens; activations are left out."""
    return facts.resident_bytes + rows * tokens * facts.kv_bytes_per_token


def free_positions(facts: PassFacts, machine: Machine, context: int) -> float:
    """Return the positions of one text that a pass verifies in the time that its weights take to arrive.

    For weights of b bytes about (FLOP/s / bandwidth) * b / 2, as in MATHS section 6.
    """
    per_position = facts.flops_per_token + context * facts.attention_flops
    return facts.weight_bytes / machine.batch_bandwidth * machine.flops_in(facts.dtype) / per_position
