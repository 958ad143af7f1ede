"""Files that the host reads and writes."""

from __future__ import annotations

from hpcrl.sandbox.attacks.witnesses import reads, writes, written_and_read
from hpcrl.sandbox.attacks.words import Attack

FILES = (
    Attack(
        name="link-to-secret",
        tries="have the host read a link to a secret of its own",
        program="os.symlink(bait['secret'], 'answer')\nlost('linked')",
        witness=reads("answer"),
    ),
    Attack(
        name="linked-folder-to-secret",
        tries="the same by a linked folder",
        program="os.symlink(bait['folder'], 'out')\nlost('linked')",
        witness=reads("out/secret"),
    ),
    Attack(
        name="hard-link-to-secret",
        tries="the same by a hard link",
        program="os.link(bait['secret'], 'answer')\nlost('linked')",
        witness=reads("answer"),
    ),
    Attack(
        name="dot-dot-to-secret",
        tries="name a file above the work folder as the answer",
        program="lost('named ../secret')",
        witness=reads("../secret"),
    ),
    Attack(
        name="absolute-path-to-secret",
        tries="name a file by its absolute path as the answer",
        program="lost('named ' + bait['secret'])",
        witness=reads("{secret}"),
    ),
    Attack(
        name="swap-link-while-read",
        tries="swap file and link while the host reads",
        program="""
background()
stop = time.monotonic() + 4
while time.monotonic() < stop:
    os.symlink(bait["secret"], "next")
    os.rename("next", "answer")
    time.sleep(0.001)
    open("next", "w").close()
    os.rename("next", "answer")
    time.sleep(0.001)
""",
        witness=reads("answer", times=30),
    ),
    Attack(
        name="fifo-to-read",
        tries="have the host hang on a FIFO",
        program="os.mkfifo('answer')\nlost('made')",
        witness=reads("answer"),
    ),
    Attack(
        name="device-to-read",
        tries="have the host read an endless device",
        program="os.symlink('/dev/zero', 'answer')\nlost('linked')",
        witness=reads("answer"),
    ),
    Attack(
        name="huge-file-to-read",
        tries="have the host read more than it asked for",
        program="open('answer', 'wb').truncate(8 * MIB)\nlost('made')",
        witness=reads("answer"),
    ),
    Attack(
        name="link-to-write",
        tries="have the host write through a link into a file of its own",
        program="os.symlink(bait['marker'], 'answer')\nlost('linked')",
        witness=writes("answer"),
    ),
    Attack(
        name="linked-folder-to-write",
        tries="the same by a linked folder",
        program="os.symlink(bait['folder'], 'out')\nlost('linked')",
        witness=writes("out/marker"),
    ),
    Attack(
        name="link-to-write-inside",
        tries="divert what the host writes to another place of the agent's",
        program="os.symlink(places[1] + '/x', 'answer')\nlost('linked')",
        witness=writes("answer", "judge(os.path.exists(places[1] + '/x'), 'there')"),
    ),
    Attack(
        name="fifo-to-write",
        tries="have the host hang on writing to a FIFO",
        program="os.mkfifo('answer')\nlost('made')",
        witness=writes("answer"),
    ),
    Attack(
        name="replace-work-folder",
        tries="put a link to a folder of the host in the place of the work folder",
        program="""
os.chdir("/")
os.rename(places[0], places[0] + ".old")
os.symlink(bait["folder"], places[0])
lost("replaced")
""",
        witness=writes("marker"),
    ),
    Attack(
        name="remove-work-folder",
        tries="remove the work folder, so that the platform fails",
        program="""
import shutil
shutil.rmtree(places[0], ignore_errors=True)
os.path.exists(places[0]) and os.rmdir(places[0])
lost("removed")
""",
        witness=written_and_read,
    ),
)
