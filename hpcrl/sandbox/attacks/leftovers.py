"""From one trajectory to the next."""

from __future__ import annotations

from hpcrl.sandbox.attacks.words import Attack

LEFT = (
    Attack(
        name="leave-files",
        tries="leave files to the next trajectory",
        program="""
for place in places:
    open(f"{place}/.left", "w").close()
lost("left")
""",
        after="found = [place for place in places if os.path.exists(place + '/.left')]\njudge(found, found)",
    ),
    Attack(
        name="leave-locked-folder",
        tries="leave a folder that can't be looked into",
        program="os.makedirs('locked/in')\nos.chmod('locked', 0)\nlost('left')",
        after="found = os.path.exists('locked')\nfound and os.chmod('locked', 0o700)\njudge(found, found)",
    ),
    Attack(
        name="leave-deep-folder",
        tries="leave a tree that is too deep to be removed",
        program="for _ in range(400): os.mkdir('d'); os.chdir('d')\nlost('left')",
        after="judge(os.path.exists('d'), os.listdir('.'))",
    ),
    Attack(
        name="leave-odd-names",
        tries="leave files whose names are no text",
        program="""
for name in (b"-rf", b"a\\nb", b"\\xff\\xfe", b"n" * 255, b"*", b" "):
    os.close(os.open(name, os.O_CREAT, 0o600))
lost("left")
""",
        after="judge(len(os.listdir(b'.')) > 5, os.listdir(b'.')[:2])",
    ),
    Attack(
        name="leave-attribute",
        tries="leave a note in an attribute of the work folder",
        program="os.setxattr(places[0], 'user.note', b'1')\nlost('left')",
        after="judge('user.note' in os.listxattr(places[0]), os.listxattr(places[0]))",
        machine=("ENOTSUP", "EOPNOTSUPP", "[]"),
    ),
    Attack(
        name="leave-mode-and-time",
        tries="leave a note in the mode and time of a folder",
        program="os.chmod(places[1], 0o751)\nos.utime(places[1], (12345, 12345))\nlost('left')",
        after="""
info = os.stat(places[1])
judge(stat.S_IMODE(info.st_mode) == 0o751 or info.st_mtime == 12345, f"{oct(info.st_mode)} {info.st_mtime}")
""",
    ),
    Attack(
        name="leave-python-module",
        tries="have the next trajectory's Python import something",
        program="""
import site
folder = site.getusersitepackages()
os.makedirs(folder, exist_ok=True)
open(folder + "/usercustomize.py", "w").write("import builtins; builtins.attacked = True")
lost("left")
""",
        after="import builtins\njudge(hasattr(builtins, 'attacked'), 'imported')",
    ),
    Attack(
        name="leave-process",
        tries="have a daemon listen for the next trajectory",
        program="""
if os.fork() == 0:
    background()
    door = socket.socket(socket.AF_UNIX)
    door.bind("\\0left-" + bait["abstract"])
    door.listen()
    time.sleep(8)
time.sleep(0.5)
lost("left")
""",
        after="socket.socket(socket.AF_UNIX).connect('\\0left-' + bait['abstract'])\nwon('connected')",
    ),
    Attack(
        name="leave-segment",
        tries="leave a System V segment",
        program="call('shmget', int(token[:7], 16) | 1, 4096, 0o1600)\nlost('left')",
        after="""
number = call("shmget", int(token[:7], 16) | 1, 4096, 0)
call("shmctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-semaphore",
        tries="leave a System V semaphore",
        program="call('semget', int(token[:7], 16) | 1, 1, 0o1600)\nlost('left')",
        after="""
number = call("semget", int(token[:7], 16) | 1, 1, 0)
call("semctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-message-queue",
        tries="leave a System V message queue",
        program="call('msgget', int(token[:7], 16) | 1, 0o1600)\nlost('left')",
        after="""
number = call("msgget", int(token[:7], 16) | 1, 0)
call("msgctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-posix-queue",
        tries="leave a POSIX message queue",
        program="call('mq_open', bait['abstract'].encode(), os.O_RDWR | os.O_CREAT, 0o600, 0)\nlost('left')",
        after="""
call("mq_open", bait["abstract"].encode(), os.O_RDWR, 0, 0)
libc.mq_unlink(b"/" + bait["abstract"].encode())
won("found it")
""",
        machine=("ENOSYS", "EMFILE"),
    ),
    Attack(
        name="leave-priority",
        tries="leave the next trajectory a runner with a lower priority",
        program="os.setpriority(os.PRIO_PROCESS, runner, 10)\nlost('left')",
        after="judge(os.nice(0) == 10, f'nice {os.nice(0)}')",
    ),
    Attack(
        name="leave-scheduling",
        tries="leave it one that runs as a batch job",
        program="os.sched_setscheduler(runner, os.SCHED_BATCH, os.sched_param(0))\nlost('left')",
        after="judge(os.sched_getscheduler(0) == os.SCHED_BATCH, os.sched_getscheduler(0))",
    ),
    Attack(
        name="leave-limits",
        tries="leave it one with lower limits",
        program="resource.prlimit(runner, resource.RLIMIT_NOFILE, (77, 77))\nlost('left')",
        after="limits = resource.getrlimit(resource.RLIMIT_NOFILE)\njudge(limits == (77, 77), limits)",
    ),
    Attack(
        name="leave-oom-score",
        tries="leave it one that the out-of-memory killer takes first",
        program="open(f'/proc/{runner}/oom_score_adj', 'w').write('999')\nlost('left')",
        after="score = open('/proc/self/oom_score_adj').read()\njudge(score == '999\\n', score)",
    ),
)
