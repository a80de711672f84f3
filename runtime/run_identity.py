"""Name all that decides which numbers a run computes, to compare runs and processes.

The identity is computed in one place (`models.identity.build_run_identity`), by node 0 and by each
worker, and is in each worker's `Ready`, in node 0's takeover record and in checkpoints. Two
identities are compared key by key, so that an error names what differs.
"""

from collections.abc import Iterable

import msgspec

Values = dict[str, str]
MAX_VALUE_CHARACTERS = 64
"""Length of the longest value that is stored as it is, not as a digest."""
DIGEST_PREFIX = "sha256 "


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Named values, or their digests, that must be equal in all processes of a run."""

    model: Values = {}
    """Values of the keys of `[model]`, in JSON; keys of its tables are named `options.KEY`."""
    training: Values = {}
    """Values of the keys of `[training]`, without `recompute`, `peak_flops` and paths of files."""
    code: Values = {}
    """Digest of the source of each user module, by the module's name (`models.identity`)."""
    data: Values = {}
    """Digests of training data, validation data, and the costs by which samples are dealt."""
    grid: Values = {}
    """Number of micro-batches of each pipeline, and the layers of each column."""
    libraries: Values = {}
    """Version of each library that computes numbers, or "not installed", by its name."""


NO_IDENTITY = RunIdentity()
"""Identity without any value, for runs that compare none."""


def describe_difference(ours: RunIdentity, theirs: RunIdentity, here: str = "here") -> str | None:
    """Return a clause that names the first difference of two identities; None if equal.

    The clause is one line of printable characters. `theirs` is the run's identity, and `here` says
    where `ours` was computed.
    """
    return next(iter(list_differences(ours, theirs, here)), None)


def list_differences(
    ours: RunIdentity, theirs: RunIdentity, here: str = "here", there: str = "in the run"
) -> list[str]:
    """Return a clause, in one printable line, for each difference of two identities.

    `here` and `there` say where the identities were computed.
    """
    clauses = []
    for part in RunIdentity.__struct_fields__:
        of_ours, of_theirs = getattr(ours, part), getattr(theirs, part)
        for key in sorted({*of_ours, *of_theirs}) if of_ours != of_theirs else ():
            our, their = of_ours.get(key), of_theirs.get(key)
            if our != their:
                clause = _describe_values(part, key, our, their, here, there)
                clauses.append(_make_printable(clause))
    return clauses


def combine_identities(identities: Iterable[RunIdentity]) -> RunIdentity:
    """Return one identity for the processes of a worker.

    A value in which the processes differ becomes a text with all of their values.
    """
    # Nearly always all are equal.
    first, *others = identities
    if all(other == first for other in others):
        return first
    combined: dict[str, Values] = {}
    for part in RunIdentity.__struct_fields__:
        values: list[Values] = [getattr(identity, part) for identity in (first, *others)]
        combined[part] = {}
        for key in set().union(*values):
            texts = {of_rank.get(key, "not given") for of_rank in values}
            combined[part][key] = " or ".join(sorted(texts))
    return RunIdentity(**combined)


def _describe_values(
    part: str, key: str, our: str | None, their: str | None, here: str, there: str
) -> str:
    # Digests say nothing to a reader, so only other values are shown.
    if part == "data":
        return f"the {key} are not the same {here} and {there}"
    if part == "code" and (our is None or their is None):
        return f"module {key} is used {there if our is None else here} only"
    if part == "code":
        return f"the source of module {key} is not the same {here} and {there}"
    name = key if part == "libraries" else f"{part}.{key}"
    if any(value is not None and value.startswith(DIGEST_PREFIX) for value in (our, their)):
        return f"{name} is not the same {here} and {there}"
    return f"{name} is {_describe_value(our)} {here} and {_describe_value(their)} {there}"


def _make_printable(text: str) -> str:
    # Values come from other processes, and are shown in terminals.
    unprintable = {character for character in text if not character.isprintable()}
    return text.translate(dict.fromkeys(map(ord, unprintable), " "))


def _describe_value(value: str | None) -> str:
    return "not given" if value is None or value == "null" else value[: 2 * MAX_VALUE_CHARACTERS]
