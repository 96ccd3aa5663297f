"""Makes the cache folder of a tokenised corpus from the `data` options, once for everything that determines it.

Called by recipes: `prepare` by one process per host, then `open_corpus` by every rank.
Must never let anyone see a folder that is not complete, and never rebuild one that is.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.corpus import check_length, open_corpus
from recipes.shared.data.kinds.chat import ChatSource
from recipes.shared.data.kinds.hub import HubSource
from recipes.shared.data.kinds.jsonl import JsonlSource
from recipes.shared.data.kinds.stdlib import StdlibSource
from recipes.shared.data.kinds.text import TextSource
from recipes.shared.data.kinds.tokens import TokensSource
from recipes.shared.data.meta import META_FILE, DataMeta, read_meta, write_meta

__all__ = ["DataMeta", "cache_key", "open_corpus", "prepare"]

FORMAT = 1  # raise it when the same options would give other files: old folders are then left alone
KINDS: dict[str, type] = {
    "stdlib": StdlibSource,
    "text": TextSource,
    "jsonl": JsonlSource,
    "tokens": TokensSource,
    "hub": HubSource,
    "chat": ChatSource,
}
NOT_OF_THE_KIND = {"kind", "cache_dir"}  # read by `make_source` and by the caller

log = logging.getLogger(__name__)


class Source(Protocol):
    """One kind of corpus with its options checked."""

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens, as JSON, found without reading the corpus."""
        ...

    def write(self, folder: Path) -> DataMeta:
        """Writes the token files into the empty `folder` (or points to existing ones) and describes them."""
        ...


def prepare(data: Mapping[str, Any], sequence_length: int, cache_root: Path) -> Path:
    """Tokenises the corpus into <cache_root>/<key>/{train.bin, validation.bin, meta.json} unless it is there already.

    One process per host calls it. When several do at once, one builds while the others wait (across hosts that share
    cache_root, where file locks do not reach, each builds and one is kept). It is built under another name and then
    renamed, so a killed build leaves nothing that is used. The key does not depend on sequence_length (in tokens),
    which is only checked against the corpus.

    Returns: the folder, for `open_corpus`.
    Raises: UserError for everything wrong with the options, the files or the cache folder.
    """
    source = make_source(data)
    key = _hash(data, source)
    folder = cache_root / key
    if not _is_complete(folder):
        try:
            cache_root.mkdir(parents=True, exist_ok=True)
            with FileLock(cache_root / f"{key}.lock"):
                if not _is_complete(folder):  # another process may have built it while this one waited
                    _build(source, folder)
        except OSError as error:
            raise UserError(_disk_problem(error, cache_root)) from error
    check_length(folder, read_meta(folder), sequence_length)
    return folder


def cache_key(data: Mapping[str, Any]) -> str:
    """Name of the corpus's folder: a hash of all that determines its content. Stats files, reads none.

    Raises: UserError for everything wrong with the options or the names of files.
    """
    return _hash(data, make_source(data))


def make_source(data: Mapping[str, Any]) -> Source:
    """The corpus that `data` describes. Raises UserError for an unknown kind, and for unknown or missing options."""
    kind = data.get("kind")
    if kind not in KINDS:
        legal = ", ".join(KINDS)
        raise UserError(Problem("data.kind", str(kind), "there is no such kind of data", f"data= one of: {legal}"))
    options = {name: value for name, value in data.items() if name not in NOT_OF_THE_KIND}
    legal_names = set(inspect.signature(KINDS[kind]).parameters)
    legal = ", ".join(sorted(legal_names))
    problems = [
        Problem(f"data.{name}", repr(options[name]), f"data.kind={kind} has no such option", f"one of: {legal}")
        for name in sorted(set(options) - legal_names)
    ]
    problems += [
        Problem(f"data.{name}", "nothing", f"data.kind={kind} needs this option", f"start from data={kind}")
        for name in sorted(legal_names - set(options))
    ]
    raise_if(problems)
    source: Source = KINDS[kind](**options)
    return source


def _hash(data: Mapping[str, Any], source: Source) -> str:
    what = {"format": FORMAT, "kind": data["kind"], **source.fingerprint()}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return f"{data['kind']}-{digest[:20]}"


def _is_complete(folder: Path) -> bool:
    return (folder / META_FILE).is_file()


def _build(source: Source, folder: Path) -> None:
    """Builds `folder` under another name, then renames it. The caller holds the lock."""
    # Under this host's lock, a partial folder of this host is what a killed build left. Those of other hosts are not
    # touched: file locks do not reach across hosts on every network file system.
    host = socket.gethostname()
    for stale in folder.parent.glob(f"{folder.name}.partial-{host}-*"):
        shutil.rmtree(stale)
    partial = folder.with_name(f"{folder.name}.partial-{host}-{os.getpid()}")
    log.info("building corpus %s", folder)
    partial.mkdir()
    try:
        write_meta(partial, source.write(partial))
        try:
            partial.rename(folder)
        except OSError:
            if not _is_complete(folder):  # otherwise another host was faster with the same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _disk_problem(error: OSError, cache_root: Path) -> Problem:
    """What to tell the user about `error`: the cache folder is its cause, or a file of the corpus."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else ""
    in_cache = bool(name) and (Path(name).is_relative_to(cache_root) or cache_root.is_relative_to(name))
    reason = error.strerror or str(error)
    if in_cache or error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "data.cache_dir= a folder that you may write to, on a disk with room"
        return Problem("data.cache_dir", str(cache_root), f"the corpus cannot be written there: {reason}", fix)
    return Problem("data", name or str(error), f"the corpus cannot be read: {reason}", "make the file readable")
