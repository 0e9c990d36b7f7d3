"""Errors that a user can act on. The command line prints them without a traceback."""


class ForedraftError(Exception):
    """A run failed for a reason that was foreseen; the command line exits with status 1."""

    exit_status = 1


class UserError(ForedraftError):
    """The user must change something; the message says what. Exit status 2."""

    exit_status = 2


class RecipeError(UserError):
    """A recipe is wrong; the message lists every fault with its dotted key and line."""


class PromptError(UserError):
    """A prompt file is missing, empty, or holds a row that cannot be read."""


class CorpusError(UserError):
    """Text to learn from is missing or empty, speaks another vocabulary, or holds what drafts are scored on."""


class TraceError(UserError):
    """A trace is missing, unfinished, or was made under another law, tokenizer or target."""


class ModelError(UserError):
    """A folder or file is no model, or not one that can be used as asked."""


class CheckpointError(UserError):
    """A draft checkpoint is missing a part, half written, or was changed after it was written."""


class VocabMismatchError(UserError):
    """Drafter and target do not speak the same tokens."""


class CapabilityError(UserError):
    """A target lacks what was asked (full logits, hidden states); the message says what offers it."""


class OutputError(UserError):
    """An output folder holds something else, or cannot be written."""


class UnknownNameError(UserError):
    """A kind that the catalog does not know; the message lists the known ones."""


class MissingExtraError(UserError):
    """A package behind an extra is not installed; the message names the pip command."""


class NonFiniteError(ForedraftError):
    """A model produced NaN or infinite figures; the message says where."""


class ServerError(ForedraftError):
    """A server could not be reached, or kept failing; the message names its address and what to change."""


class DrafterError(ForedraftError):
    """A drafter broke its contract: ids outside the vocabulary, laws that are none."""
