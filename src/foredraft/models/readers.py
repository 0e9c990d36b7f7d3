"""How a draft reads text: a model that attends keeps keys and values, a light net sums that only grow."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from foredraft.models.batch_session import BatchSession
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.light.reading import LightBatchSession, LightTexts
from foredraft.models.light.session import LightSession
from foredraft.models.session import Session
from foredraft.models.timing import EqualTexts


@dataclass(frozen=True, slots=True)
class Readers:
    """The classes that read for a kind of model.

    Attributes:
        session: One text that grows.
        batch: Several texts that grow, each at its own pace.
        texts: Several texts of equal length, to time steps over a batch.
    """

    session: type[Session] | type[LightSession]
    batch: type[BatchSession] | type[LightBatchSession]
    texts: type[EqualTexts] | type[LightTexts]


_ATTENDING = Readers(Session, BatchSession, EqualTexts)
_LIGHT = Readers(LightSession, LightBatchSession, LightTexts)


def readers_of(model: PreTrainedModel) -> Readers:
    return _LIGHT if isinstance(model, LightForCausalLM) else _ATTENDING
