"""The `Sandbox` fake: a dict of files and a few commands, for tests of rooms that need a sandbox's answers only.

It isolates nothing and runs nothing: what it doesn't know is "command not found", as in a real one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from hpcrl.types import CommandResult


class MemorySandbox:
    """Knows `ls [FOLDER]`, `cat FILE…`, `echo WORD…`, `true`, `false`; checks paths as a real one does."""

    alive = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, ...]] = []

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult:
        self.calls.append(tuple(command))
        code, out, err = self._answer(list(command), stdin)
        return CommandResult(
            code=code,
            stdout=out[:cap_bytes],
            stderr=err[:cap_bytes],
            duration_s=0.0,
            stdout_bytes=len(out),
            stderr_bytes=len(err),
        )

    async def write(self, files: Mapping[str, bytes]) -> None:
        self.files.update({_inside(path): bytes(data) for path, data in files.items()})

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes:
        data = self.files.get(_inside(path))
        if data is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        if len(data) > cap_bytes:
            raise OSError(27, f"file of {len(data)} bytes exceeds the cap of {cap_bytes}", path)
        return data

    async def renew(self) -> None:
        self.files.clear()

    async def close(self) -> None:
        self.files.clear()

    def _answer(self, command: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        name, arguments = command[0], [word for word in command[1:] if not word.startswith("-")]
        if name == "ls":
            prefix = "" if not arguments or arguments[0] == "." else arguments[0].rstrip("/") + "/"
            below = [path.removeprefix(prefix) for path in self.files if path.startswith(prefix)]
            names = sorted({path.split("/")[0] for path in below})
            return 0, "".join(f"{item}\n" for item in names).encode(), b""
        if name == "cat":
            missing = [path for path in arguments if path not in self.files]
            errors = "".join(f"cat: {path}: No such file or directory\n" for path in missing)
            data = b"".join(self.files.get(path, b"") for path in arguments) if arguments else stdin
            return int(bool(missing)), data, errors.encode()
        if name == "echo":
            return 0, (" ".join(command[1:]) + "\n").encode(), b""
        if name in ("true", "false"):
            return int(name == "false"), b"", b""
        return 127, b"", f"{name}: No such file or directory\n".encode()


def _inside(path: str) -> str:
    clean = posixpath.normpath(path)
    if path.startswith("/") or clean.startswith("..") or clean == ".":
        raise OSError(22, "path must lie below the work folder", path)
    return clean
