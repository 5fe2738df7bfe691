"""Write torch's distributed checkpoints with checksums, and read them without running code in their pickles."""

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
from titanplans.training.checkpoint.manifest import Manifest, write_manifest
from titanplans.training.checkpoint.multi_token import FILE, MultiTokenLayers, write_layers


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint and its manifest into a temporary folder, and renames the folder when it is complete."""

    # The checksum of a file is computed while it is written. Each rank attaches its checksums to the results that torch
    # sends to the rank that finishes the save. This works whether the save runs in this thread, in another thread or in
    # another process.

    def __init__(self, checkpoint: Path, manifest: Manifest, layers: MultiTokenLayers | None = None):
        super().__init__(folder.writing_path(checkpoint))
        self.checkpoint, self.manifest, self.layers = checkpoint, manifest, layers
        # torch's attribute `fs` opens the files that it writes.
        self.fs = self.hashing = _HashingFileSystem()  # pyrefly: ignore[bad-override-mutable-attribute]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files as torch does; attach their checksums to the results."""
        results = _HashedResults(super().write_data(plan, planner).value())
        results.checksums, self.hashing.checksums = self.hashing.checksums, {}
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's index and the manifest, and rename the folder. Called on one rank, after all ranks have written."""
        super().finish(metadata, results)
        # torch writes the index under this name and renames it.
        checksums = {".metadata": self.hashing.checksums[".metadata.tmp"]}
        for result in results:
            checksums |= cast(_HashedResults, result).checksums
        if self.layers is not None:
            checksums[FILE] = write_layers(self.layers, Path(self.path))
        write_manifest(Path(self.path), replace(self.manifest, files=checksums))
        sync(Path(self.path))
        folder.commit(self.checkpoint)


class _HashedResults(list[WriteResult]):
    """The results of one rank's writes, with the size and checksum of each file."""

    checksums: dict[str, tuple[int, str]]


class _HashingFileSystem(FileSystem):
    """torch's file system, which also records size and checksum of each file that is written."""

    def __init__(self) -> None:
        self.checksums: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            try:
                yield hashing  # type: ignore[misc]
            except Exception as error:
                # torch.save replaces the OSError of a full disk with a RuntimeError: raise the original error.
                if hashing.error is not None:
                    raise hashing.error from error
                raise
            self.checksums[Path(path).name] = hashing.size, hashing.checksum.hexdigest()


class _HashingStream:
    """A stream that hashes the bytes that are written to it."""

    def __init__(self, stream: io.IOBase):
        self._stream = stream
        self.size, self.checksum = 0, xxhash.xxh3_128()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum.update(data)
        self.size += memoryview(data).nbytes
        try:
            return self._stream.write(data)  # pyrefly: ignore[missing-attribute]
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint of titanplans or torchtitan. The index is read only once, for any number of loads."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the checkpoint.

        Raises:
            ConfigError: the index can't be read, is damaged, or holds objects that no checkpoint needs.
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
                f"{path} is not the index of a checkpoint: it holds a {type(metadata).__name__}; take another checkpoint"
            )
        return metadata


def cause_of(failed: CheckpointException) -> BaseException:
    """Return the most telling error of the ranks that failed: a UserError if there is one, else an OSError, else any."""
    causes = [cause for cause, _ in failed.failures.values()]
    kinds = (UserError, OSError, BaseException)
    return next(cause for kind in kinds for cause in causes if isinstance(cause, kind))


class Planner(DefaultLoadPlanner):
    """torch's load planner, but it refuses objects that could run code when they are loaded."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object that consists of numbers, strings, tensors, lists and dicts.

        Raises:
            ConfigError: the object holds anything else.
        """
        # torch's planner loads the object with weights_only=False. It is first loaded here with weights_only=True, which
        # refuses objects that could run code.
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{read_item.storage_index.fqn} in the checkpoint is damaged, or holds objects that could run code; take "
                "another checkpoint"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    """Unpickles the classes of a checkpoint's index, and refuses all others, since they could run code."""

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
