"""From an answer that was just written to a row of a buffer."""

from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.decoding.witness import Recorder
from foredraft.trace.buffer import Gathered
from foredraft.trace.rows import TraceRow


def gathered(recorder: Recorder, prompt_ids: Int[Tensor, " tokens"], domain: str, finish_reason: str) -> Gathered:
    """Return what was recorded of one answer.

    The prompt's id is made of its tokens: a prompt that is served twice is one prompt, whatever it was called.
    """
    said, prompt_id = recorder.continuation(finish_reason), digest_of(prompt_ids.tolist())
    row = TraceRow.of(
        said,
        id=prompt_id,
        prompt_id=prompt_id,
        domain=domain,
        prompt_ids=prompt_ids.cpu(),
        answer_ids=said.token_ids,
        finish_reason=finish_reason,
    )
    return Gathered(row, recorder.guess_ids())
