"""A folder, mounted twice as two nodes of a cluster see a badly behaving network filesystem. Needs root and /dev/fuse.

    with slow_mounts(tmp_path, seconds=30) as (a, b): …      python slow_mount.py BACKING MOUNT SECONDS

Each mount is a process that speaks the kernel's FUSE protocol over one backing folder, and does as NFS does:

- attributes, names (those that were not found, too) and listings are kept for `seconds`: what the other mount appends,
  renames, unlinks or makes is seen late; a listing is thrown away early when this mount changes the folder itself
- opening a file asks for its size anew and forgets its cached pages (close-to-open), but believes a kept name
- a file that the other mount unlinked or replaced is ESTALE through a descriptor; by name the kernel tries it once more
- one that this mount unlinks while it is open here is renamed to .nfs<n> until it is closed
- no locks: flock, fcntl and lockf give ENOLCK

It speaks the protocol itself (the numbers are those of linux/fuse.h): some bindings answer for paths and can't tell
a file that has lost its name, others can't refuse locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import stat
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN = struct.Struct("<IIQQIIIHH")  # fuse_in_header: length, opcode, unique, node, …
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<QQQQII")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_BUFFER = (1 << 20) + 8192
_PAGES, _LOCKS, _MAX_PAGES, _AUTO_INVAL = 256, 1 << 1 | 1 << 10, 1 << 22, 1 << 12
_FLAGS = 1 | 1 << 5 | 1 << 18 | _LOCKS | _MAX_PAGES | _AUTO_INVAL  # also async reads, big writes, parallel lookups
_NOTIFY_INVAL_INODE = 2


class _Node:
    """A file that the kernel knows: held by an O_PATH descriptor, whatever becomes of its name."""

    def __init__(self, fd: int) -> None:
        self.fd, self.lookups, self.opened = fd, 0, 0
        self.hidden: tuple[int, str] | None = None  # folder and name, once it was unlinked while open

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def stat(self) -> os.stat_result:
        found = os.fstat(self.fd)
        if not found.st_nlink:
            raise OSError(errno.ESTALE, "its last name is gone")
        return found


class SlowMount:
    def __init__(self, backing: str, mount: str, seconds: float) -> None:
        self._valid = (int(seconds), int(seconds % 1 * 1e9))
        self._seconds = seconds
        self._nodes = {1: _Node(os.open(backing, os.O_PATH | os.O_DIRECTORY))}
        self._numbers: dict[tuple[int, int], int] = {}  # (device, inode) -> node
        self._last = 1
        self._listings: dict[int, tuple[float, list[bytes]]] = {}
        self._opened: dict[int, tuple[int, list[bytes]]] = {}  # handle -> node, what a folder's shows
        self._num_hidden: Counter[int] = Counter()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"slow", mount.encode(), b"fuse.slow", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount", mount)

    def serve(self) -> None:
        """Until it is unmounted."""
        while True:
            try:
                data = os.read(self._device, _BUFFER)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                raise
            _, opcode, unique, node, *_ = _IN.unpack_from(data)
            call = getattr(self, _CALLS.get(opcode, ""), None)
            answer, number = b"", 0 if call else errno.ENOSYS
            if call:
                try:
                    answer = call(node, memoryview(data)[_IN.size :])
                except OSError as error:
                    number = error.errno or errno.EIO
                except KeyError:
                    number = errno.ESTALE
            if answer is not None:
                self._write(unique, -number, b"" if number else answer)

    def _write(self, unique: int, number: int, answer: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # interrupted, or an inode that the kernel doesn't have
            os.write(self._device, _OUT.pack(_OUT.size + len(answer), number, unique) + answer)

    # ---- what the kernel is told

    def _attributes(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return _ATTR.pack(
            found.st_ino, found.st_size, found.st_blocks, *(ns // 10**9 for ns in times), *(ns % 10**9 for ns in times),
            found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0,
        )  # fmt: skip

    def _attr_out(self, found: os.stat_result) -> bytes:
        return struct.pack("<QII", *self._valid, 0) + self._attributes(found)

    def _entry(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        number = self._numbers.get(key)
        if number is None:
            self._last += 1
            number = self._numbers[key] = self._last
            self._nodes[number] = _Node(fd)
        else:
            os.close(fd)
        self._nodes[number].lookups += 1
        seconds, rest = self._valid
        return _ENTRY.pack(number, 0, seconds, seconds, rest, rest) + self._attributes(found)

    def _changed(self, *folders: int) -> None:
        for folder in folders:
            self._listings.pop(folder, None)

    def _open_file(self, number: int, fd: int) -> bytes:
        self._opened[fd] = (number, [])
        self._nodes[number].opened += 1
        return struct.pack("<QII", fd, 0, 0)

    def _hide(self, folder: int, name: str) -> bool:
        """Keep what is open here under another name, when it is to lose this one."""
        found = os.stat(name, dir_fd=self._nodes[folder].fd, follow_symlinks=False)
        node = self._nodes.get(self._numbers.get((found.st_dev, found.st_ino), 0))
        if node is None or not node.opened or node.hidden or found.st_nlink > 1:
            return False
        self._num_hidden[folder] += 1
        node.hidden = (folder, f".nfs{os.getpid()}-{folder}-{self._num_hidden[folder]}")
        at = self._nodes[folder].fd
        os.rename(name, node.hidden[1], src_dir_fd=at, dst_dir_fd=at)
        return True

    # ---- calls

    def init(self, _: int, data: memoryview) -> bytes:
        _, _, readahead, flags = struct.unpack_from("<IIII", data)
        head = struct.pack("<IIIIHHIIHHI", 7, 31, readahead, flags & _FLAGS, 16, 12, 1 << 20, 1, _PAGES, 0, 0)
        return head.ljust(64, b"\0")

    def lookup(self, parent: int, data: memoryview) -> bytes:
        try:
            return self._entry(parent, _name(data))
        except FileNotFoundError:
            self._nodes[parent].stat()
            seconds, rest = self._valid
            return _ENTRY.pack(0, 0, seconds, 0, rest, 0) + bytes(_ATTR.size)

    def forget(self, number: int, data: memoryview) -> None:
        self._forget(number, *struct.unpack_from("<Q", data))

    def batch_forget(self, _: int, data: memoryview) -> None:
        (count,) = struct.unpack_from("<I", data)
        for at in range(count):
            self._forget(*struct.unpack_from("<QQ", data, 8 + 16 * at))

    def _forget(self, number: int, count: int) -> None:
        node = self._nodes.get(number)
        if node is None or number == 1:
            return
        node.lookups -= count
        if node.lookups <= 0 and not node.opened:
            found = os.fstat(node.fd)
            self._numbers.pop((found.st_dev, found.st_ino), None)
            os.close(node.fd)
            del self._nodes[number]
            self._listings.pop(number, None)

    def getattr_(self, number: int, _: memoryview) -> bytes:
        return self._attr_out(self._nodes[number].stat())

    def setattr_(self, number: int, data: memoryview) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = _SETATTR.unpack_from(
            data
        )
        node = self._nodes[number]
        old = node.stat()
        if valid & 1:
            Path(node.path).chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(node.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(handle if valid & 64 else node.path, size)
        if valid & (16 | 32):
            now = time.time_ns()
            times = (
                now if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else old.st_atime_ns,
                now if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else old.st_mtime_ns,
            )
            os.utime(node.path, ns=times)
        self._changed(number)
        return self._attr_out(node.stat())

    def readlink(self, number: int, _: memoryview) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[number].fd))

    def symlink(self, parent: int, data: memoryview) -> bytes:
        name, target = bytes(data).split(b"\0")[:2]
        os.symlink(target, name, dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        return self._entry(parent, os.fsdecode(name))

    def mknod(self, parent: int, data: memoryview) -> bytes:
        mode, device, _, _ = struct.unpack_from("<IIII", data)
        os.mknod(_name(data[16:]), mode, device, dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        return self._entry(parent, _name(data[16:]))

    def mkdir(self, parent: int, data: memoryview) -> bytes:
        (mode,) = struct.unpack_from("<I", data)
        os.mkdir(_name(data[8:]), mode, dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        return self._entry(parent, _name(data[8:]))

    def unlink(self, parent: int, data: memoryview) -> bytes:
        if not self._hide(parent, _name(data)):
            os.unlink(_name(data), dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        return b""

    def rmdir(self, parent: int, data: memoryview) -> bytes:
        os.rmdir(_name(data), dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        return b""

    def rename(self, parent: int, data: memoryview) -> bytes:
        return self._rename(parent, *struct.unpack_from("<Q", data), data[8:])

    def rename2(self, parent: int, data: memoryview) -> bytes:
        target, flags = struct.unpack_from("<QI", data)
        if flags:
            raise OSError(errno.EINVAL, "no flags")
        return self._rename(parent, target, data[16:])

    def _rename(self, parent: int, target: int, names: memoryview) -> bytes:
        old, new = (os.fsdecode(name) for name in bytes(names).split(b"\0")[:2])
        os.stat(old, dir_fd=self._nodes[parent].fd, follow_symlinks=False)
        with contextlib.suppress(FileNotFoundError):
            self._hide(target, new)
        os.rename(old, new, src_dir_fd=self._nodes[parent].fd, dst_dir_fd=self._nodes[target].fd)
        self._changed(parent, target)
        return b""

    def link(self, parent: int, data: memoryview) -> bytes:
        (number,) = struct.unpack_from("<Q", data)
        os.link(self._nodes[number].path, _name(data[8:]), dst_dir_fd=self._nodes[parent].fd, follow_symlinks=True)
        self._changed(parent)
        return self._entry(parent, _name(data[8:]))

    def open(self, number: int, data: memoryview) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        node = self._nodes[number]
        node.stat()
        fd = os.open(node.path, flags & ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL))
        self._write(0, _NOTIFY_INVAL_INODE, struct.pack("<Qqq", number, -1, 0))  # its attributes
        return self._open_file(number, fd)

    def create(self, parent: int, data: memoryview) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        name = _name(data[16:])
        fd = os.open(name, flags | os.O_CREAT, mode, dir_fd=self._nodes[parent].fd)
        self._changed(parent)
        entry = self._entry(parent, name)
        return entry + self._open_file(_ENTRY.unpack_from(entry)[0], fd)

    def read(self, number: int, data: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        self._nodes[number].stat()
        return os.pread(handle, size, offset)

    def write(self, number: int, data: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        self._nodes[number].stat()
        return struct.pack("<II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def fallocate(self, number: int, data: memoryview) -> bytes:
        handle, offset, length, mode = struct.unpack_from("<QQQI", data)
        self._nodes[number].stat()
        if mode:
            raise OSError(errno.EOPNOTSUPP, "no modes")
        os.posix_fallocate(handle, offset, length)
        return b""

    def fsync(self, number: int, data: memoryview) -> bytes:
        handle, flags = struct.unpack_from("<QI", data)
        self._nodes[number].stat()
        (os.fdatasync if flags & 1 else os.fsync)(handle)
        return b""

    def flush(self, *_: object) -> bytes:
        return b""

    def release(self, number: int, data: memoryview) -> bytes:
        (handle,) = struct.unpack_from("<Q", data)
        del self._opened[handle]
        os.close(handle)
        node = self._nodes[number]
        node.opened -= 1
        if not node.opened and node.hidden:
            folder, name = node.hidden
            with contextlib.suppress(OSError, KeyError):
                os.unlink(name, dir_fd=self._nodes[folder].fd)
            self._changed(folder)
        if not node.opened and node.lookups <= 0:
            self._forget(number, 0)
        return b""

    def statfs(self, *_: object) -> bytes:
        found = os.statvfs(self._nodes[1].path)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0).ljust(80, b"\0")

    def opendir(self, number: int, _: memoryview) -> bytes:
        node = self._nodes[number]
        node.stat()
        looked, entries = self._listings.get(number, (0.0, []))
        if time.monotonic() - looked > self._seconds:
            with os.scandir(node.path) as found:
                entries = [_dirent(at, entry) for at, entry in enumerate(found, 1)]
            self._listings[number] = (time.monotonic(), entries)
        fd = os.open(node.path, os.O_RDONLY | os.O_DIRECTORY)
        answer = self._open_file(number, fd)
        self._opened[fd] = (number, entries)
        return answer

    def readdir(self, _: int, data: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        answer = b""
        for entry in self._opened[handle][1][offset:]:
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def lock(self, *_: object) -> bytes:
        raise OSError(errno.ENOLCK, "no locks here")

    def nothing(self, *_: object) -> None:
        """Interrupted calls are done all the same."""


def _name(data: memoryview) -> str:
    return os.fsdecode(bytes(data).split(b"\0")[0])


def _dirent(at: int, entry: os.DirEntry[str]) -> bytes:
    name = os.fsencode(entry.name)
    kind = 4 if entry.is_dir(follow_symlinks=False) else 10 if entry.is_symlink() else 8
    data = struct.pack("<QQII", entry.inode(), at, len(name), kind) + name
    return data.ljust(-(-len(data) // 8) * 8, b"\0")


_CALLS = {
    1: "lookup", 2: "forget", 3: "getattr_", 4: "setattr_", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "release", 30: "fsync",
    31: "lock", 32: "lock", 33: "lock", 35: "create", 36: "nothing", 42: "batch_forget", 43: "fallocate", 45: "rename2",
}  # fmt: skip


@contextlib.contextmanager
def slow_mounts(folder: Path, seconds: float = 30.0) -> Iterator[tuple[Path, Path]]:
    """Two mounts of `folder`/shared, at `folder`/a and `folder`/b. Skips the test where they can't be made."""
    if os.geteuid() or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse (modprobe fuse), to mount a folder twice")
    backing = folder / "shared"
    mounts = (folder / "a", folder / "b")
    with contextlib.ExitStack() as ends:
        for path in (backing, *mounts):
            path.mkdir(parents=True)
        for mount in mounts:
            command = [sys.executable, __file__, str(backing), str(mount), str(seconds)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ends.callback(_end, process, mount)
            assert process.stdout is not None and process.stderr is not None
            if process.stdout.readline() != "mounted\n":
                said = process.stderr.read()
                if "PermissionError" in said:
                    pytest.skip("root may not mount here (a container without CAP_SYS_ADMIN)")
                pytest.fail(said[-2000:])
        yield mounts


def _end(process: subprocess.Popen[str], mount: Path) -> None:
    subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    process.terminate()  # what is still open there fails from now on
    process.wait()
    assert process.stderr is not None
    said = process.stderr.read()
    assert "Error" not in said, said


if __name__ == "__main__":
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    mounted = SlowMount(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    print("mounted", flush=True)
    mounted.serve()
