"""Names of features and subjects, each loaded only when asked for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from harness.errors import UnknownSubject

if TYPE_CHECKING:
    from harness.spec.protocols import OptionValue, Subject

__all__ = ["FEATURES", "Feature", "adapt", "features_with", "load_subject", "resolve", "subject_names"]

ENTRY_POINT_GROUP: Final = "harness.subjects"


class Feature(NamedTuple):
    """A capability of the compiler with a contract.

    Attributes:
        summary: one sentence.
        subjects: the built-in ones, each by the ``module:attribute`` of a function that takes options and gives a Subject.
        strategy: ``module:attribute`` of the Hypothesis strategy that draws its programs.
        laws: ``module:attribute`` of its table of laws.
        adapter: ``module:attribute`` of the function that makes a Subject of a user's callable.
    """

    summary: str
    subjects: Mapping[str, str]
    strategy: str
    laws: str
    adapter: str


FEATURES: Final[Mapping[str, Feature]] = {
    "bucketing": Feature(
        "merge all_gathers, reduce_scatters and all_reduces of one group into fewer, larger collectives",
        {
            "reference": "harness.subjects.bucketing:reference",
            "inductor": "harness.subjects.bucketing:inductor",
        },
        "harness.strategies.collectives:collective_programs",
        "harness.check:BUCKETING_LAWS",
        "harness.subjects.graph_pass:from_callable",
    ),
    "mutation": Feature(
        "put back what forward and backward write in place: once, in the half where it happened, gradients connected",
        {
            "reference": "harness.subjects.autograd:mutation_reference",
            "inductor": "harness.subjects.autograd:mutation_inductor",
            "aot_eager": "harness.subjects.autograd:mutation_aot_eager",
            "aot_autograd": "harness.subjects.autograd:mutation_aot_autograd",
        },
        "harness.strategies.mutations:mutation_programs",
        "harness.oracles.mutation:MUTATION_LAWS",
        "harness.subjects.autograd:from_backend",
    ),
    "saved_tensors": Feature(
        "inline saved tensor hooks: pack at the end of forward, unpack at the beginning of backward, for the tensors that a mode selects",
        {
            "reference": "harness.subjects.saved_tensors:saved_reference",
            "inductor": "harness.subjects.saved_tensors:saved_inductor",
            "aot_eager": "harness.subjects.saved_tensors:saved_aot_eager",
            "aot_autograd": "harness.subjects.saved_tensors:saved_aot_autograd",
        },
        "harness.strategies.saved_tensors:saved_tensor_programs",
        "harness.oracles.saved_tensors:SAVED_TENSOR_LAWS",
        "harness.subjects.saved_tensors:from_backend",
    ),
}


def subject_names(feature: str | None = None) -> tuple[str, ...]:
    """The names of built-in and installed subjects, of one feature or of all."""
    features = FEATURES.values() if feature is None else (FEATURES[feature],)
    names = {name for f in features for name in f.subjects}
    names.update(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    return tuple(sorted(names))


def features_with(subject: str) -> tuple[str, ...]:
    """The features that have a built-in subject by that name; the first where none has, for then it is a user's pass."""
    return tuple(name for name, feature in FEATURES.items() if subject in feature.subjects) or tuple(FEATURES)[:1]


def load_subject(name: str, *, feature: str | None = None, options: Mapping[str, OptionValue] | None = None) -> Subject:
    """The subject called ``name``, with one setting of its options.

    Args:
        name: a built-in name, the name of an entry point in the group ``harness.subjects``, ``package.module:attribute`` or
            ``path/to/file.py:attribute``. An attribute is a pass (a callable that changes a graph module) or a Subject.
        feature: the feature it is to implement; ``bucketing`` where left out.
        options: as a Finding stores them; the subject's first variant where left out.

    Raises:
        UnknownSubject: there is none by that name, it does not load, or does not take those options.
    """
    wanted = feature or "bucketing"
    if wanted not in FEATURES:
        raise UnknownSubject(f"no feature {wanted!r}; there are: {', '.join(FEATURES)}")
    built_in = FEATURES[wanted].subjects.get(name)
    if built_in is not None:
        subject = resolve(built_in)()
    else:
        subject = adapt(name, _load_foreign(name), wanted)
    return _with_options(subject, options)


def resolve(target: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _with_options(subject: Subject, options: Mapping[str, OptionValue] | None) -> Subject:
    if options is None:
        return subject
    for variant in subject.variants():
        if dict(variant.options) == dict(options):
            return variant
    with_options: Callable[[Mapping[str, OptionValue]], Subject] | None = getattr(subject, "with_options", None)
    if with_options is None:
        raise UnknownSubject(f"subject {subject.name!r} has no variant with options {dict(options)}")
    return with_options(options)


def adapt(name: str, found: Any, feature: str) -> Subject:
    """``found`` itself where it is a Subject, else a Subject made of the callable.

    Raises:
        UnknownSubject: it is neither.
    """
    if all(hasattr(found, attribute) for attribute in ("variants", "promises", "label")) and (hasattr(found, "apply") or hasattr(found, "session")):
        subject: Subject = found
        return subject
    if not callable(found):
        raise UnknownSubject(f"subject {name!r} is a {type(found).__name__}; a pass (a callable on a graph module) or a Subject is needed")
    adapted: Subject = resolve(FEATURES[feature].adapter)(name, feature, found)
    return adapted


def _load_foreign(name: str) -> Any:
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            try:
                return point.load()
            except Exception as error:
                raise UnknownSubject(f"entry point {name!r} ({point.value}) does not load: {_describe(error)}") from error
    where, separator, attribute = name.rpartition(":")
    if not separator:
        known = ", ".join(subject_names())
        raise UnknownSubject(f"no subject {name!r}; there are {known}, package.module:attribute and path/to/file.py:attribute")
    module = _module_from_file(Path(where)) if where.endswith(".py") else _module_by_name(where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UnknownSubject(f"{where} has no attribute {attribute!r}") from None


def _module_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UnknownSubject(f"module {name!r} does not import: {_describe(error)}") from error


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownSubject(f"no file {path}")
    resolved = path.resolve()
    name = f"harness_subject_{resolved.stem}_{hashlib.blake2b(bytes(resolved), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UnknownSubject(f"{path} does not load: {_describe(error)}") from error
    return module


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else '(no message)'}"
