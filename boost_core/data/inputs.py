"""What finished shards hold of their input, so that a run goes on beside it only where that is what it was."""

import hashlib
from collections.abc import Iterator, Sequence

from boost_core.config.data import SourceConfig
from boost_core.config.sources.files import SourceFile
from boost_core.config.sources.tokenized import Input
from boost_core.data.documents import Document, documents


class Reading:
    """The documents of one file, with a digest of those that were read.

    Args:
        file: The file.
        source: How its documents are found.
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
        # Lengths go in, so that text moved over a border changes the digest; no document is as long as a bad one's.
        length = -1 if document.problem else len(document.content)
        self._digest.update(length.to_bytes(8, "little", signed=True))
        if not document.problem:
            self._digest.update(document.content)
        return document

    def so_far(self, first: int, whole: bool) -> Input:
        """What was read.

        Args:
            first: Place of the first document that shards hold of it.
            whole: Whether nothing is left to read.
        """
        return Input(
            file=self.file.url, size=self.file.size, stamp=self.file.stamp, first=first, end=self.count,
            digest=self._digest.hexdigest(), whole=whole,
        )  # fmt: skip

    def skip(self, held: Input) -> None:
        """Read over what shards hold.

        Raises:
            ValueError: It is not what they hold.
        """
        while self.count < held.end and next(self, None) is not None:
            pass
        rest = next(self._documents, None) if held.whole else None
        if rest is not None or self._digest.hexdigest() != held.digest:
            raise ValueError(
                f"{self.file.url} has changed, and finished shards hold tokens of what it was; put it back as it was, "
                "or tokenize into another folder"
            )


def refuse_changed(held: Sequence[Input], files: Sequence[SourceFile], source: SourceConfig) -> None:
    """Refuse input that is not what shards hold. Files that they hold nothing of may change, come and go.

    Args:
        held: The files that shards hold something of, in order.
        files: The files that are there now, in order.
        source: How their documents are found.

    Raises:
        ValueError: A file is gone, has changed, or has come between them.
    """
    for place, was in enumerate(held):
        file = files[place] if place < len(files) else None
        if file is None or file.url != was.file:
            there = file is not None and any(each.url == was.file for each in files)
            problem = f"{file.url} has come before it" if file and there else "it is gone"
            raise ValueError(
                f"finished shards hold tokens of {was.file}, and {problem}; give the same files as before, with new "
                "ones only after them in the order of their names, or tokenize into another folder"
            )
        # Of a file that is to be read further, what is skipped is checked while skipping.
        if was.whole and (not file.stamp or (file.size, file.stamp) != (was.size, was.stamp)):
            Reading(file, source).skip(was)
