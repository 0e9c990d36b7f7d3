"""Drafters by what a user calls them: a folder, a hub id, a kind with options, and ways of drafting behind it."""

import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import yaml

from foredraft.catalog import names, resolve, unknown_name_message
from foredraft.checkpoint import MANIFEST
from foredraft.core.errors import CapabilityError, UnknownNameError, UserError
from foredraft.core.law import SamplingLaw
from foredraft.core.options import read_options
from foredraft.core.protocols import Drafter, Observer, Speaker, TextReader, WeighsMemory
from foredraft.lineage import manifest_for
from foredraft.models.beside import hold_once
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.models.foreign import refuse_foreign_head
from foredraft.models.loading import DTYPES, load_causal_lm
from foredraft.models.made_for import refuse_other_tokenizer
from foredraft.models.target import LocalTarget
from foredraft.select.saved import load_selection


def load_drafter(spec: str, target: Speaker, trust_remote_code: bool = False) -> Drafter:
    """Return the drafter that `spec` names: a folder, a hub id, `kind:option=value,...`, or a saved selection.

    Behind it may stand ways of drafting, each applied to what stands before it: `draft+tree:max_nodes=16,width=4`,
    `draft+confident:threshold=0.4`, `small+cascade:middle=draft`.

    Raises:
        VocabMismatchError: it does not speak the target's tokens; the message names the first difference.
        UnknownNameError: it is no folder and no known kind.
        UserError: a way of drafting does not take such options.
        CapabilityError: a drafter that learns stands before a way of drafting that tells it nothing.
    """
    base, *wraps = split_spec(spec)
    drafter = _load_plain(base, target, trust_remote_code)
    if isinstance(drafter, CausalLMDrafter) and isinstance(target, LocalTarget):
        hold_once(drafter.draft.model, target.model)
    for wrap in wraps:
        factory, options = read_wrapper(wrap)
        wrapped = factory(drafter, partial(load_drafter, target=target, trust_remote_code=trust_remote_code), **options)
        if isinstance(drafter, Observer) and not isinstance(wrapped, Observer):
            raise CapabilityError(
                f"A drafter of kind {drafter.kind} learns from its own blocks, of which {wrap} tells it nothing: "
                "leave one of the two out."
            )
        drafter = wrapped
    return _informed(drafter, target) if isinstance(target, LocalTarget) else drafter


def _informed(drafter: Drafter, target: LocalTarget) -> Drafter:
    """Return a drafter that knows of the target what it can make use of."""
    if isinstance(drafter, WeighsMemory):
        drafter = drafter.beside(target.num_bytes)
    if isinstance(drafter, TextReader):
        drafter = drafter.reading(partial(target.tokenizer.decode, skip_special_tokens=True))
    return drafter


def split_spec(spec: str) -> list[str]:
    """Return what a spec starts from, and the ways of drafting behind it."""
    return re.split(rf"\+(?=(?:{'|'.join(names('wrappers'))})(?:[:+]|$))", spec)


def read_wrapper(wrap: str) -> tuple[Callable[..., Drafter], dict[str, Any]]:
    """Return what makes one drafter of another, and its options.

    Raises:
        UnknownNameError: no such way of drafting.
        UserError: it does not take such an option.
    """
    name = wrap.partition(":")[0]
    factory = resolve("wrappers", name)
    takes = list(signature(factory).parameters.values())[2:]  # behind the drafter and what loads others
    return factory, read_options(wrap, {option.name: type(option.default) for option in takes})


def _load_plain(spec: str, target: Speaker, trust_remote_code: bool) -> Drafter:
    path = Path(spec)
    kind, _, options = spec.partition(":")
    if (path / MANIFEST).is_file():
        return resolve("loaders", manifest_for(path, target).kind)(path, _draft_dtype(target))
    if kind in names("drafters"):
        return resolve("drafters", kind)(target.vocab_size, **_options(options, spec))
    if path.suffix == ".json" and path.is_file():
        load = partial(load_drafter, target=target, trust_remote_code=trust_remote_code)
        return load_selection(path, target, load)
    if path.exists() or "/" in spec:
        return _foreign_draft(spec, target, trust_remote_code)
    message = unknown_name_message("drafter", spec, names("drafters"))
    raise UnknownNameError(f"{message} A draft folder or a hub id will do too.")


def _foreign_draft(spec: str, target: Speaker, trust_remote_code: bool) -> Drafter:
    refuse_foreign_head(spec)
    loaded = load_causal_lm(spec, _draft_dtype(target), trust_remote_code)
    refuse_other_tokenizer(spec, loaded.tokenizer, target)
    return CausalLMDrafter(Draft(loaded.model), SamplingLaw(), target.vocab_size)


def _draft_dtype(target: Speaker) -> str:
    """Return what drafts compute in: what the target does, unless it is not here or of another kind, such as Q4_K."""
    return target.dtype if target.dtype in DTYPES else "auto"


def _options(text: str, spec: str) -> dict[str, int | float | str]:
    options = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        if not separator:
            raise UserError(f"{spec}: {part!r} is no option; write kind:option=value,option=value.")
        options[name] = yaml.safe_load(value)
    return options
