"""Records of the input that finished shards hold, so that a run continues only if that input is unchanged."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from boost_core.config.data import SourceConfig
from boost_core.config.sources.files import SourceFile
from boost_core.config.sources.tokenized import Input
from boost_core.data.documents import Document, documents


def refuse_own_output(source: SourceConfig, folder: str) -> None:
    """Refuse a folder for tokens in a folder of which all files are read, where later runs would read the tokens, too.

    Raises:
        ValueError: It is one of the source's folders, or in one.
    """
    if source.kind == "dataset":  # of whose folders only Arrow files are read
        return
    tokens = _absolute(folder)
    for path in source.paths:
        documents_in = _absolute(path)
        if tokens == documents_in or tokens.startswith(f"{documents_in}/"):
            raise ValueError(f"{folder} is in {path}, of which all files are read; write the tokens to another folder")


def _absolute(path: str) -> str:
    local = path.removeprefix("file://")
    return local.rstrip("/") if "://" in local else str(Path(local).resolve())


class Reading:
    """Iterates over the documents of one file and keeps a digest of those read.

    Args:
        file: The file.
        source: Its source, which says how documents are found in it.
    """

    def __init__(self, file: SourceFile, source: SourceConfig) -> None:
        self.file, self.count = file, 0
        self._documents = documents(file, source)
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        document = next(self._documents)
        self.count += 1
        # Lengths are hashed so that moving text between documents changes the digest; bad documents count as -1.
        length = -1 if document.problem else len(document.content)
        self._digest.update(length.to_bytes(8, "little", signed=True))
        if not document.problem:
            self._digest.update(document.content)
        return document

    def so_far(self, first: int, whole: bool) -> Input:
        """A record of what was read.

        Args:
            first: Index of the first of its documents that the shards hold.
            whole: Whether nothing is left to read.
        """
        return Input(
            file=self.file.url, size=self.file.size, stamp=self.file.stamp, first=first, end=self.count,
            digest=self._digest.hexdigest(), whole=whole,
        )  # fmt: skip

    def skip(self, held: Input) -> None:
        """Skip the documents that shards hold.

        Raises:
            ValueError: The documents differ from what the shards hold.
        """
        while self.count < held.end and next(self, None) is not None:
            pass
        rest = next(self._documents, None) if held.whole else None
        if rest is not None or self._digest.hexdigest() != held.digest:
            raise ValueError(
                f"{self.file.url} has changed, and finished shards hold tokens of its old content; restore it, or "
                "tokenize into another folder"
            )


def refuse_changed(held: Sequence[Input], files: Sequence[SourceFile], source: SourceConfig) -> None:
    """Refuse input that differs from what shards hold. Files not in any shard may change, come and go.

    Args:
        held: The files of which shards hold something, in order.
        files: The files that are there now, in order.
        source: Their source, which says how documents are found in them.

    Raises:
        ValueError: A file is gone, has changed, or was added between them.
    """
    for place, was in enumerate(held):
        file = files[place] if place < len(files) else None
        if file is None or file.url != was.file:
            there = file is not None and any(each.url == was.file for each in files)
            problem = f"{file.url} was added before it" if file and there else "it is gone"
            raise ValueError(
                f"finished shards hold tokens of {was.file}, and {problem}; give the same files as before, with new "
                "ones only after them in order of name, or tokenize into another folder"
            )
        # A file with more to read is checked while what shards hold is skipped.
        if was.whole and (not file.stamp or (file.size, file.stamp) != (was.size, was.stamp)):
            Reading(file, source).skip(was)
