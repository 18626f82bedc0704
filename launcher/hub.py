"""Model files from a Hugging Face hub: fetched once into huggingface_hub's cache, resumed, and checked before use.

Owns the transfer. Names are chosen by `hub_files.py`; places, tokens and endpoints are huggingface_hub's (HF_HOME,
HF_TOKEN, HF_ENDPOINT). Needs the extra `bloomery[hf]`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bloomery.launcher.hub_files import Wanted, chosen_files
from bloomery.runtime.errors import BloomeryError

Progress = Callable[[str, int, int], None]
CHUNK = 8 << 20
REVISION = "main"


def model_from_hub(
    wanted: Wanted, *, token: str | None, offline: bool, progress: Progress, say: Callable[[str], None]
) -> str:
    """Path of the model file (the first shard of a split one), which is in the cache when this returns.

    Nothing is transferred that is there already. Without a connection the cache is used, and `say` gets a line that
    says so. Raises BloomeryError: no such repository, file or quant type; a transfer that broke off (the next call goes
    on where it ended); a file whose checksum is not the hub's.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        raise BloomeryError(
            "--hf needs huggingface_hub", "pip install 'bloomery[hf]', or give a file with -m"
        ) from None
    hub = _Hub(wanted, token, progress)
    if offline or constants.HF_HUB_OFFLINE:
        return hub.cached("offline")
    try:
        return hub.fetched()
    except _Unreachable as error:
        path = hub.cached(str(error))
        say(f"{error}: {wanted.repository} comes from the cache, {path}")
        return path


class _Unreachable(Exception):
    """The hub did not answer."""


class _Hub:
    def __init__(self, wanted: Wanted, token: str | None, progress: Progress) -> None:
        from huggingface_hub import constants

        self._wanted, self._token, self._progress = wanted, token, progress
        self._endpoint = constants.ENDPOINT
        self._cache = Path(constants.HF_HUB_CACHE)
        self._folder = self._cache / f"models--{wanted.repository.replace('/', '--')}"

    def cached(self, why: str) -> str:
        """The file as it lies in the cache."""
        with contextlib.suppress(OSError):
            commit = (self._folder / "refs" / REVISION).read_text().strip()
            snapshot = self._folder / "snapshots" / commit
            names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf") if path.exists()]
            if names:
                return str(snapshot / chosen_files(self._wanted, names)[0])
        raise BloomeryError(
            f"{self._wanted.repository} is not in the cache {self._cache}, and the hub cannot be asked: {why}",
            "connect once, or give a file with -m",
        )

    def fetched(self) -> str:
        from huggingface_hub import HfApi

        with self._errors():
            api = HfApi(endpoint=self._endpoint, token=self._token)
            info = api.model_info(self._wanted.repository, revision=REVISION)
        names = [entry.rfilename for entry in info.siblings or ()]
        files = chosen_files(self._wanted, names)
        paths = [self._file(name, info.sha or REVISION) for name in files]
        return paths[0]

    def _file(self, name: str, commit: str) -> str:
        """One file; huggingface_hub links it into its cache once the data is there and checked."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

        url = hf_hub_url(self._wanted.repository, name, revision=commit, endpoint=self._endpoint)
        with self._errors():
            facts = get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint)
        etag, size = facts.etag or "", facts.size or 0
        blob = self._folder / "blobs" / etag
        pointer = self._folder / "snapshots" / commit / name
        own = bool(etag) and size <= MAX_HTTP_DOWNLOAD_SIZE  # larger ones come in huggingface_hub's own way
        if not pointer.exists() and not blob.exists() and own:
            with _lock(blob.with_name(f"{etag}.bloomery.lock")):
                if not blob.exists():
                    self._transfer(url, name, blob, etag, size)
        fresh = not own and not pointer.exists()
        with self._errors():
            path = hf_hub_download(
                self._wanted.repository, name, revision=REVISION, token=self._token, endpoint=self._endpoint
            )
        if fresh:
            self._check(Path(path).resolve(), name, etag, size)
        return str(path)

    def _transfer(self, url: str, name: str, blob: Path, etag: str, size: int) -> None:
        from huggingface_hub import get_token
        from huggingface_hub.file_download import http_get

        part = blob.with_name(f"{etag}.bloomery.part")
        there = part.stat().st_size if part.exists() else 0
        if there > size:
            part.unlink()
            there = 0
        free = os.statvfs(blob.parent)
        if size - there > free.f_bavail * free.f_frsize:
            raise BloomeryError(
                f"{name} needs {(size - there) / 1e9:.1f} GB in {self._cache}, there are "
                f"{free.f_bavail * free.f_frsize / 1e9:.1f} GB",
                "make room, or set HF_HOME to another disk",
            )
        token = self._token or get_token()
        stage = f"fetch {name.rsplit('/', 1)[-1]}"
        with part.open("r+b" if there else "wb") as file, self._errors(part):
            file.seek(there)
            http_get(
                url,
                file,
                resume_size=there,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                expected_size=size,
                displayed_filename=name,
                tqdm_class=_bar_class(self._progress, stage, size),
            )
            file.flush()
            os.fsync(file.fileno())
        self._check(part, name, etag, size)
        part.rename(blob)

    def _check(self, path: Path, name: str, etag: str, size: int) -> None:
        """Compares with the hub's checksum (ETag: SHA-256 of large files, git's of small ones); removes a bad file."""
        if len(etag) == 64:
            digest = hashlib.sha256()
        elif len(etag) == 40:
            digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        else:
            raise BloomeryError(f"{name}: the hub gives no checksum", "download it by hand and use -m")
        done = 0
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
                done += len(block)
                self._progress(f"check {name.rsplit('/', 1)[-1]}", done, size)
        if digest.hexdigest() != etag.lower():
            path.unlink()
            raise BloomeryError(
                f"{name} arrived damaged: its checksum is {digest.hexdigest()}, the hub's is {etag}",
                "start again to fetch it anew",
            )

    @contextlib.contextmanager
    def _errors(self, part: Path | None = None) -> Iterator[None]:
        """huggingface_hub's errors as ours; `part` is what a transfer has brought so far."""
        from huggingface_hub import errors

        repository = self._wanted.repository
        try:
            yield
        except errors.GatedRepoError:
            raise BloomeryError(
                f"{repository} is only for those who accepted its terms", "accept them on its page and set HF_TOKEN"
            ) from None
        except errors.RepositoryNotFoundError:
            raise BloomeryError(
                f"{self._endpoint} has no repository {repository}, or it is private",
                "check the name; for a private one set HF_TOKEN",
            ) from None
        except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
            raise BloomeryError(f"{repository}: {_first_line(error)}", "check the name") from None
        except errors.OfflineModeIsEnabled:
            raise _Unreachable("HF_HUB_OFFLINE is set") from None
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if part is not None:
                done = part.stat().st_size if part.exists() else 0
                raise BloomeryError(
                    f"the transfer broke off after {done >> 20} MiB: {_first_line(error)}",
                    "start again: it goes on from there",
                ) from error
            if isinstance(status, int) and status < 500:
                raise BloomeryError(
                    f"{self._endpoint} answers {status}: {_first_line(error)}", "check HF_TOKEN"
                ) from error
            if status is not None or isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
                raise _Unreachable(f"{self._endpoint} cannot be reached ({_first_line(error)})") from error
            raise


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two programs that want the same file: the second waits, and finds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bar_class(progress: Progress, stage: str, size: int) -> Any:
    """What huggingface_hub takes for a progress bar."""

    class Bar:
        def __init__(self, *, initial: int = 0, **options: Any) -> None:
            self._done = initial
            progress(stage, initial, size)

        def update(self, count: float | None = 1) -> None:
            self._done += int(count or 0)
            progress(stage, self._done, size)

        def close(self) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            pass

    return Bar
