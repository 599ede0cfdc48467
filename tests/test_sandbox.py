"""The sandbox against hostile programs: each must end, and nothing outside may have changed."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_sft import sandbox
from cluster_sft.sandbox import Limits, Outcome, SandboxUnavailable, run_isolated

SHORT = Limits(
    wall_seconds=20, cpu_seconds=5, memory_bytes=512 << 20, file_bytes=1 << 20, processes=8
)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop its capabilities")


@pytest.fixture(autouse=True, scope="module")
def isolation() -> None:
    reason = sandbox.probe()
    if reason and sys.platform == "linux" and "not permitted" not in reason:
        pytest.fail(reason)  # not a machine that forbids namespaces, but a defect of ours
    if reason:
        pytest.skip(f"no sandbox here: {reason}")


def run(code: str, limits: Limits = SHORT) -> Outcome:
    return run_isolated(["-c", textwrap.dedent(code)], limits=limits)


def processes_with(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            # The jail's own command line holds the program's, so that it is found too.
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_program_that_behaves_gets_its_request_and_returns_its_output():
    outcome = run_isolated(["-c", "print(input()[::-1])"], request=b"abc\n", limits=SHORT)
    assert (outcome.state, outcome.code, outcome.output) == ("exited", 0, b"cba\n")


def test_program_is_an_unprivileged_user_alone_in_its_namespace():
    outcome = run(
        """
        import ctypes, os
        print(os.getuid() > 60000, os.getpid(), os.getppid(), os.getgroups() in ([], [65534]))
        for attempt in (lambda: os.setuid(0), lambda: os.chroot("/sandbox")):
            try:
                attempt()
                print("privileged")
            except OSError:
                pass
        print(ctypes.CDLL(None).mount(b"x", b"/sandbox", b"tmpfs", 0, None))
        """
    )
    assert outcome.output == b"True 1 0 True\n-1\n"


def test_endless_loop_is_killed_at_the_wall_limit():
    begun = time.monotonic()
    outcome = run("import time\nwhile True: time.sleep(1)", Limits(wall_seconds=0.5))
    assert outcome.state == "timeout"
    assert time.monotonic() - begun < 20


def test_busy_loop_that_ignores_signals_is_killed_at_the_cpu_limit():
    outcome = run(
        """
        import signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
        """,
        Limits(wall_seconds=20, cpu_seconds=1),
    )
    assert (outcome.state, outcome.code) == ("exited", -signal.SIGKILL)


def test_detached_descendants_die_with_the_program():
    mark = uuid.uuid4().hex
    outcome = run(
        f"""
        import os, time
        "{mark}"
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    while True: time.sleep(1)
                os._exit(0)
        time.sleep(0.2)
        print("left")
        """
    )
    assert outcome.output == b"left\n"
    assert processes_with(mark) == []


@pytest.mark.parametrize("seen", [2, 3])  # the caller and the jail; and its child, maybe not yet
@pytest.mark.parametrize("later", [0, 0.3])  # isolated: when it starts, and when it runs
def test_descendants_die_when_the_calling_process_is_killed(seen, later):
    mark = uuid.uuid4().hex
    code = f"from cluster_sft.sandbox import *\nrun_isolated(['-c', 'while True: pass # {mark}'])"
    for _ in range(3):
        caller = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 60
        while len(processes_with(mark)) < seen:
            assert time.monotonic() < deadline
        time.sleep(later)
        caller.kill()
        caller.wait()
        while processes_with(mark):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_memory_bomb_gets_a_memory_error():
    outcome = run("x = []\nwhile True: x.append(bytearray(1 << 26))")
    assert outcome.code == 1
    assert outcome.error.strip().endswith("MemoryError")


def test_memory_bomb_of_several_processes_is_killed_at_the_limit_of_all():
    outcome = run(
        """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                held = b"x" * (200 << 20)
                time.sleep(60)
        time.sleep(60)
        """
    )
    assert outcome.state == "memory"


def test_fork_bomb_reaches_the_process_limit_and_is_killed():
    mark = uuid.uuid4().hex
    outcome = run(
        f"""
        import os, sys, time
        "{mark}"
        made = 0
        try:
            while made < 1000 and os.fork():
                made += 1
            else:
                time.sleep(60)
        except BlockingIOError:
            print(made, flush=True)
        while True:
            try: os.fork()
            except OSError: pass
        """,
        Limits(wall_seconds=2, processes=8),
    )
    assert outcome.state == "timeout"
    assert 0 < int(outcome.output.split()[0]) < 8
    assert processes_with(mark) == []


def test_files_elsewhere_cannot_be_written(tmp_path):
    mark = f"cluster-sft-{uuid.uuid4().hex}"
    package = Path(sandbox.__file__).parent
    folders = [tmp_path, package, Path.cwd(), Path.home(), *map(Path, ("/", "/tmp", "/var/tmp"))]
    folders += map(Path, (sys.prefix, "/usr/lib", "/dev", "/dev/shm", "/proc", "/run"))
    outcome = run(
        f"""
        import os
        open("own", "w").write("x")
        for folder in {[str(folder) for folder in folders]}:
            for mode in ("w", "a"):
                try:
                    os.makedirs(folder, exist_ok=True)
                    open(os.path.join(folder, "{mark}"), mode).write("x")
                    print(folder)
                except OSError:
                    pass
        for path in ({str(package / "sandbox.py")!r}, "/usr/bin/env"):
            for attempt in (lambda p: open(p, "a"), os.unlink, lambda p: os.chmod(p, 0)):
                try:
                    attempt(path)
                    print("changed", path)
                except OSError:
                    pass
        """
    )
    # Shared memory is private to the program, and gone with it.
    assert (outcome.code, outcome.output.split()) == (0, [b"/dev/shm"] * 2)
    assert [folder for folder in folders if (folder / mark).exists()] == []


def test_files_of_the_user_cannot_be_read(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    outcome = run(
        f"""
        import os
        for path in ({str(secret)!r}, "/etc/shadow", "/etc/passwd", "/proc/1/environ"):
            try:
                print(open(path).read())
            except OSError:
                pass
        print(sorted(os.environ))
        """
    )
    assert outcome.code == 0
    assert b"hidden" not in outcome.output
    assert b"HF_TOKEN" not in outcome.output
    assert outcome.output.count(b"\n") == 1


def test_disk_cannot_be_filled():
    outcome = run(
        """
        total = 0
        for i in range(1000):
            try:
                with open(str(i), "wb", buffering=0) as file:
                    while True: total += file.write(b"x" * 65536)
            except OSError as error:
                if error.errno == 28: break
        print(total)
        """
    )
    assert 0 < int(outcome.output) <= 4 * SHORT.file_bytes


def test_output_cannot_exceed_the_file_limit():
    outcome = run("while True: print('x' * 1000)")
    assert outcome.code != 0
    assert len(outcome.output) <= SHORT.file_bytes


def test_network_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        abstract = f"\0cluster-sft-{uuid.uuid4().hex}"
        local.bind(abstract)
        local.listen()
        outcome = run(
            f"""
            import socket
            for family, address in (
                (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                (socket.AF_INET, ("192.0.2.1", 80)),
                (socket.AF_UNIX, {abstract!r}),
            ):
                try:
                    socket.socket(family).connect(address)
                    print("connected", address)
                except OSError:
                    pass
            """
        )
        assert (outcome.code, outcome.output) == (0, b"")
        for listener in (server, local):
            listener.settimeout(0.2)
            with pytest.raises(TimeoutError):
                listener.accept()


def test_other_processes_cannot_be_signalled():
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    outcome = run(
        f"""
        import os
        for process in ({bystander.pid}, {os.getpid()}, os.getppid() or -1, -1):
            try: os.kill(process, 9)
            except OSError: pass
        print("done")
        """
    )
    assert outcome.output == b"done\n"
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


@ROOT_ONLY
def test_without_the_right_to_isolate_the_reason_is_given_and_nothing_runs(tmp_path):
    code = f"""if True:
        import ctypes, os, sys
        assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0  # drop CAP_SYS_ADMIN for good
        os.execv(sys.executable, [sys.executable, "-c", '''if True:
            from cluster_sft import sandbox
            print(sandbox.probe())
            try: sandbox.run_isolated(["-c", "open({str(tmp_path / "ran")!r}, 'w')"])
            except sandbox.SandboxUnavailable: print("refused")
        '''])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reason, refused = done.stdout.splitlines()
    assert "Operation not permitted" in reason
    assert refused == "refused"
    assert not (tmp_path / "ran").exists()


def test_jail_that_breaks_is_unavailable_and_says_so(tmp_path, monkeypatch):
    broken = tmp_path / "jail.py"
    broken.write_text("raise SystemExit('no such luck')")
    monkeypatch.setattr(sandbox._jail, "__file__", str(broken))
    with pytest.raises(SandboxUnavailable, match="no such luck"):
        run("print()")


@pytest.fixture
def public_folder():
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_ordinary_user_is_isolated_too(public_folder):
    if os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs root and a system Python to become another user with")
    source = public_folder / "cluster_sft"
    source.mkdir()
    for name in ("_jail.py", "sandbox.py"):
        (source / name).write_bytes((Path(sandbox.__file__).parent / name).read_bytes())
    (source / "__init__.py").touch()
    source.chmod(0o755)
    # The probe tries to write beside sandbox.py: its owner could, were it not mounted read-only.
    os.chown(source, 12345, 12345)
    done = subprocess.run(
        ["/usr/bin/python3", "-c", "from cluster_sft import sandbox; print(sandbox.probe())"],
        env={"PYTHONPATH": str(public_folder), "HOME": "/nonexistent"},
        user=12345,
        group=12345,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    if "Operation not permitted" in done.stdout:
        pytest.skip("user namespaces are switched off")
    assert done.stdout.strip() == "None", done.stderr


def test_jail_constants_are_those_of_this_system():
    libc = ctypes.CDLL(None, use_errno=True)
    number = sandbox._jail.SYS_PIVOT_ROOT[os.uname().machine]
    assert libc.syscall(ctypes.c_long(number), b"/nonexistent", b"/nonexistent") == -1
    # EPERM or ENOENT: it is a call about paths; ENOSYS or EINVAL would mean another call.
    assert ctypes.get_errno() in (1, 2)


def test_programs_at_the_same_time_do_not_share_their_limit_of_processes():
    crowded = """
        import os, time
        for _ in range(4):
            if os.fork() == 0: time.sleep(60)
        print("made", flush=True)
        time.sleep(1)
        """
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: run(crowded, replace(SHORT, processes=6)), range(4)))
    assert [outcome.output for outcome in outcomes] == [b"made\n"] * 4
