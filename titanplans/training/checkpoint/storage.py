"""torch's distributed checkpoints on a file system: written with checksums, read without running their pickles.

A file's checksum is taken as it is written. Each rank hands those of its files, with what it has written, to the rank that
ends the save, which puts them into the card. So it is the same for a save in this thread, in another or in another process.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import xxhash
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from titanplans.disk import sync
from titanplans.errors import ConfigError, UserError
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import Card, write_card


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint into a temporary folder, its files into its card, and renames the folder when it is complete."""

    def __init__(self, checkpoint: Path, card: Card):
        super().__init__(folder.writing_path(checkpoint))
        self.checkpoint, self.card = checkpoint, card
        self.fs = self.hashing = _Hashing()  # pyrefly: ignore[bad-override-mutable-attribute]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """torch's, and the checksums of the files that this rank has written."""
        results = _Results(super().write_data(plan, planner).value())
        results.sums, self.hashing.sums = self.hashing.sums, {}
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """torch's, then the card, then the rename. One rank calls it, after all have written."""
        super().finish(metadata, results)
        sums = {".metadata": self.hashing.sums[".metadata.tmp"]}
        for result in results:
            sums |= cast(_Results, result).sums
        write_card(Path(self.path), replace(self.card, files=sums))
        sync(Path(self.path))
        folder.commit(self.checkpoint)


class _Results(list[WriteResult]):
    """The results of one rank's writes, with the size and checksum of each file."""

    sums: dict[str, tuple[int, str]]


class _Hashing(FileSystem):
    """torch's file system, which remembers size and checksum of each file that is written."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = _Hashed(stream)
            try:
                yield hashed  # type: ignore[misc]
            except Exception as error:
                if hashed.failed is not None:  # torch makes a RuntimeError of it
                    raise hashed.failed from error
                raise
            self.sums[Path(path).name] = hashed.size, hashed.checksum.hexdigest()


class _Hashed:
    """A stream that hashes the bytes that it writes."""

    def __init__(self, stream: io.IOBase):
        self._stream = stream
        self.size, self.checksum = 0, xxhash.xxh3_128()
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum.update(data)
        self.size += memoryview(data).nbytes
        try:
            return self._stream.write(data)  # pyrefly: ignore[missing-attribute]
        except OSError as error:
            self.failed = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint of ours or of torchtitan's; its index once, for any number of loads."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the checkpoint.

        Raises:
            ConfigError: its index is not a checkpoint's, or holds objects that no checkpoint needs.
        """
        self._index = self._index or self._read_index()
        return self._index

    def _read_index(self) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except OSError as error:
            raise ConfigError(f"{path} can't be read ({error.strerror}); take another checkpoint") from error
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{path} is damaged ({reason}); take another checkpoint") from error
        if not isinstance(metadata, Metadata):
            raise ConfigError(
                f"{path} is not the index of a checkpoint: it holds a {type(metadata).__name__}; take another"
            )
        return metadata


def cause_of(failed: CheckpointException) -> BaseException:
    """Return the first error of the ranks that failed: a UserError before an OSError before any other."""
    causes = [cause for cause, _ in failed.failures.values()]
    kinds = (UserError, OSError, BaseException)
    return next(cause for kind in kinds for cause in causes if isinstance(cause, kind))


class Planner(DefaultLoadPlanner):
    """torch's, which also loads objects other than tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put numbers, strings, tensors, lists and dicts where they belong.

        Raises:
            ConfigError: there is something else.
        """
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{read_item.storage_index.fqn} in it is damaged, or holds what could run code; take another checkpoint"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    """Unpickles torch's descriptions of tensors and files, and nothing that could run."""

    _ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath", "Path"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")
