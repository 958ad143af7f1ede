r"""The node's log: where a record becomes durable. One owner (the supervisor), fed by its hosts (link.py).

    append --\                                                     /--> where it lies
    append ----> one writev and one fdatasync for all that wait ------> where it lies          (in this order, always)
    append --/                                                     \--> where it lies

A segment opens with its first record and closes at a size or an age, or when asked; readers of other nodes touch
closed ones only. After any failure to write or sync, everything that waits gets the OSError, the segment is closed at
the last byte that a sync had confirmed, and the next append starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import EIO
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.layout import by_name, check_private, is_full, listed, sync_folder, write_at
from hpcrl.store.segment import CLOSED, OPEN, close_name, create, name_parts, owner_of, recover, segments, ship
from hpcrl.types import StoreError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Place = tuple[int, int]  # (segment number, byte offset in it)
_Waiting = tuple[Sequence[bytes], asyncio.Future[list[Place]]]
MAX_INTERVAL_S = 2.0
FULL_RETRY_S = 1.0


class _Segment:
    """The segment being written. Made, written and closed by the commit thread; the loop reads `end` and `since`."""

    def __init__(self, folder: Path, node: str, home: Path, now: float, sync: Callable[[int], None] | None) -> None:
        self._sync = sync
        self.path, self._fd, header, self._header = create(folder, node, home)
        self.number = header.number
        self.end = 0  # bytes that a sync has confirmed
        self.since = now

    def commit(self, frames: Sequence[bytes]) -> list[Place]:
        offset = self.end or len(self._header)
        places = []
        for frame in frames:
            places.append((self.number, offset))
            offset += len(frame)
        write_at(self._fd, self.end, frames if self.end else [self._header, *frames])
        (self._sync or os.fdatasync)(self._fd)
        if not self.end:
            sync_folder(self.path.parent)  # the name must be as durable as what it names
        self.end = offset
        return places

    def close(self) -> None:
        os.fsync(self._fd)
        self.drop()
        close_name(self.path)

    def drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def take_over(folder: Path, node: str, home: Path) -> None:
    """Close what a dead owner of this node left open in `folder`, and move what is closed there to `home`.

    Raises StoreError when the owner lives, or `folder` is on the node's own disk and not this user's alone.
    """
    if folder != home:
        check_private(folder)
    for path in segments(folder, OPEN):
        if name_parts(path)[0] != node:
            continue
        with contextlib.suppress(FileNotFoundError):  # somebody else has closed it meanwhile
            owner = owner_of(path)
            if owner is not None and owner.lives():
                raise StoreError(f"{path}: process {owner.pid} writes this node's log; stop it first")
            recover(path)
    for path in listed(home, f".{node}-*{CLOSED}.*.tmp"):  # of one that was killed in `ship`
        if re.fullmatch(rf"\.{re.escape(node)}-[0-9]+{re.escape(CLOSED)}\.[0-9]+\.tmp", path.name):
            path.unlink(missing_ok=True)
    _move(folder, node, home)


def _move(folder: Path, node: str, home: Path) -> None:
    for path in segments(folder, CLOSED) if folder != home else ():
        if name_parts(path)[0] == node:
            by_name(ship, path, home)


class Log:
    """The owner's side. One instance per node and run folder: StoreError when another live process owns the node's log.

    `commit_interval_s` is the least time between the starts of two syncs; where syncs are slow it grows, so that they
    take a fifth of the time at the most, up to MAX_INTERVAL_S; 0: sync at once, whatever it costs. An append that comes
    later than that after the last sync waits for nothing but its own. On a disk or quota that is used up appends wait
    for space, for `full_patience_s`, before they fail; `full` says so meanwhile. `sync`: in place of fdatasync, to see
    what slow ones cost.

    `scratch`: a folder on this node's disk. Segments are written there then, and move to `folder` when they are closed:
    what is acknowledged survives all but the loss of the node, and other nodes read it only after that.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        segment_bytes: int,
        segment_age_s: float,
        commit_interval_s: float,
        full_patience_s: float = 0.0,
        sync: Callable[[int], None] | None = None,
        scratch: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.node, self.home = scratch or folder, node, folder
        self.num_syncs = 0
        self._bytes, self._age_s, self._interval_s, self._clock = segment_bytes, segment_age_s, commit_interval_s, clock
        self._segment: _Segment | None = None
        self._broken: dict[Path, int] = {}  # segments that failed -> their confirmed end; still to be closed
        self.failures = 0  # batches that could not be stored
        self.last_error = OSError()  # why the latest of them could not
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._synced_at = -float("inf")
        self.sync_s = 0.0  # what a sync takes, of late
        self.full = False
        self._patience_s, self._sync = full_patience_s, sync
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._sealing = 0  # who waits for the segment to be closed: meanwhile the commit thread takes in nothing more
        self._moving = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        take_over(self.folder, node, self.home)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log")

    async def append(self, frames: Sequence[bytes]) -> list[Place]:
        """Make frames durable; where they lie. Raises OSError when they could not be: then none of them is there."""
        return await self.submit(frames)

    def submit(self, frames: Sequence[bytes]) -> asyncio.Future[list[Place]]:
        """`append` without the wait. Frames of one call, and calls in their order, lie one after the other."""
        if self._closed:
            raise OSError("the log is closed")
        future: asyncio.Future[list[Place]] = asyncio.get_running_loop().create_future()
        self._waiting.append((frames, future))
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="log")
        return future

    async def seal(self) -> None:
        """Close the open segment now, so that other nodes may read it. Raises OSError when that fails."""
        self._sealing += 1
        try:
            await self._in_thread(self._close_segment)
        finally:
            self._sealing -= 1
        if self._broken:
            raise OSError(f"can't close {', '.join(map(str, self._broken))}: see the log")
        await self._move()

    async def close(self) -> None:
        """Commit what waits, close the segment. Raises OSError when the segment can't be closed (its data is safe).

        Goes on to its end when the caller is cancelled: who appended hears what came of it.
        """
        self._closed = True
        self._wake.set()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close the log")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._task is not None:
                await self._task
        finally:
            try:
                await self.seal()
            finally:
                self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        """Commits while anything waits or a segment is open; ends when all is quiet."""
        while self._waiting or (self._segment is not None and not self._closed):
            if not self._waiting:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._left_s(self._segment))
            if self._waiting:
                interval_s = max(self._interval_s, min(5 * self.sync_s, MAX_INTERVAL_S)) if self._interval_s else 0.0
                pause = self._synced_at + interval_s - self._clock()
                if pause > 0 and not self._closed:
                    await asyncio.sleep(pause)
                await self._commit()
            if self._is_due():
                await self._in_thread(self._close_segment)
                self._mover = asyncio.create_task(self._move(quiet=True))

    @property
    def local(self) -> bool:
        """Whether it is written to this node's disk, where other nodes can't read it."""
        return self.folder != self.home

    async def _move(self, quiet: bool = False) -> None:
        """Closed segments to other nodes. Not in the commit thread: appends go on meanwhile."""
        async with self._moving:
            try:
                await asyncio.to_thread(_move, self.folder, self.node, self.home)
            except OSError as error:
                logger.error("%s: segments stay here until they can be moved to %s: %s", self.folder, self.home, error)
                if not quiet:
                    raise

    def _left_s(self, segment: _Segment | None) -> float:
        """Until it is to be closed."""
        return segment.since + self._age_s - self._clock() if segment is not None else 0.0

    async def _commit(self) -> None:
        batch, full_since = self._take(), self._clock()
        refused: list[_Waiting] | None = None  # the batch for which there was no space at `full_since`
        while batch:
            batch, places, error = await self._in_thread(self._write_batches, batch, asyncio.get_running_loop())
            if error is None:
                self._deliver(batch, places)  # by the loop, so that what waits is on its way before anyone hears of it
                return
            if refused is not batch:
                refused, full_since = batch, self._clock()
            self.full = is_full(error) and not self._closed and self._clock() - full_since < self._patience_s
            if not self.full:
                self._fail(batch, error)
                if not isinstance(error, OSError):
                    raise error
                return
            await asyncio.sleep(FULL_RETRY_S)  # nothing is acknowledged meanwhile, and nothing fails yet

    def _take(self) -> list[_Waiting]:
        """All that waits. Of a deque, since the commit thread takes from it what the loop puts in."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _deliver(self, batch: Sequence[_Waiting], places: Sequence[Place]) -> None:
        self.full = False
        start = 0
        for frames, future in batch:
            if not future.done():
                future.set_result(list(places[start : start + len(frames)]))
            start += len(frames)

    def _fail(self, batch: Sequence[_Waiting], error: Exception) -> None:
        """What waits behind the batch fails with it: it may build on a record that isn't there."""
        self.failures += 1
        self.last_error = OSError(getattr(error, "errno", 0) or EIO, str(error))
        for _, future in (*batch, *self._take()):
            if not future.done():
                future.set_exception(OSError(*self.last_error.args))

    async def _in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        # Shielded: a cancelled caller must not leave the thread's result unseen.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, call, *args))

    # ---- in the commit thread

    def _write_batches(
        self, batch: list[_Waiting], loop: asyncio.AbstractEventLoop
    ) -> tuple[list[_Waiting], list[Place], Exception | None]:
        """Commit the batch; where syncs are not paced, then what has come since, without a turn of the loop between,
        until the segment is to be closed. The last one, and where it lies, or why it could not be stored."""
        while True:
            self._synced_at = self._clock()
            try:
                places = self._write([frame for frames, _ in batch for frame in frames])
            except Exception as error:
                return batch, [], error
            self.sync_s += 0.2 * (self._clock() - self._synced_at - self.sync_s)
            behind = [] if self._interval_s or self._sealing or self._is_due() else self._take()
            if not behind:
                return batch, places, None
            loop.call_soon_threadsafe(self._deliver, batch, places)
            batch = behind

    def _is_due(self) -> bool:
        """Whether the open segment is to be closed."""
        segment = self._segment  # once: the other thread may close it, or make one, meanwhile
        return segment is not None and (segment.end >= self._bytes or self._left_s(segment) <= 0)

    def _write(self, frames: Sequence[bytes]) -> list[Place]:
        if self._segment is None:
            self._mend()
            self._segment = _Segment(self.folder, self.node, self.home, self._clock(), self._sync)
        segment = self._segment
        try:
            places = segment.commit(frames)
        except Exception as error:
            # What the failed sync covered may be lost though the kernel now calls it clean: this descriptor is done.
            logger.error("%s: %s; closing it at byte %d", segment.path, error, segment.end)
            self._break(segment)
            raise
        self.num_syncs += 1
        return places

    def _close_segment(self) -> None:
        segment = self._segment
        if segment is not None:
            try:
                segment.close()
                self._segment = None
            except OSError as error:
                logger.error("%s: can't be closed yet: %s", segment.path, error)
                self._break(segment)
        self._mend()

    def _break(self, segment: _Segment) -> None:
        segment.drop()
        self._broken[segment.path] = segment.end
        self._segment = None
        self._mend()

    def _mend(self) -> None:
        """Close segments that failed, at their last confirmed byte; what can't be yet is tried again."""
        for path, end in list(self._broken.items()):
            try:
                if end:
                    recover(path, end)
                else:
                    path.unlink(missing_ok=True)
                del self._broken[path]
            except FileNotFoundError:
                del self._broken[path]  # it was renamed before its folder's sync failed
            except (OSError, StoreError) as error:
                logger.error("%s: can't be closed yet: %s", path, error)
