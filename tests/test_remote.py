"""scripts/remote.sh against a throw-away sshd on loopback: what goes there, runs there, comes back.

The sshd is an ordinary process of this user with keys made for it. Tests that need it have the
marker `clients`, like all that need other people's programs, and fail with the package's name where
one is missing. Most work on a small tree whose `nanoserve.bench` writes down what it was
given; one takes this tree and its own benchmark.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "remote.sh"
NEEDED = {
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "git": "git",
}
PATIENCE_S = 60.0
needs_sshd = pytest.mark.clients

AWKWARD = (
    *("two words", "it's", '"quoted"', "$HOME `id` $(id) ${x}", "*", "?[a-z]", "~", "", "-n", "--"),
    *(
        "line\nbreak\n",
        "tab\there",
        "back\\slash\\n",
        "%s",
        "!!",
        "; exit 9 #",
        "é → 東",
        "a=b",
        "{1,2}",
    ),
)

BENCH = """\
import json, pathlib, sys
print("argv", json.dumps(sys.argv[1:]), flush=True)
folder = pathlib.Path("results/box")
folder.mkdir(parents=True, exist_ok=True)
with (folder / "kvcache-stub.jsonl").open("a") as file:
    file.write(json.dumps({"argv": sys.argv[1:]}) + "\\n")
sys.exit(int(sys.argv[sys.argv.index("--exit") + 1]) if "--exit" in sys.argv else 0)
"""


def tool(name: str) -> str:
    """The path of a program. Fails with the package that brings it."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    assert found, f"this test needs {name}: apt-get install {NEEDED.get(name, name)}"
    return found


def wait_for(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"in {PATIENCE_S:.0f} s there was no {what}"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sshd:
    """A running sshd and what a client needs for it."""

    port: int
    key: Path
    known_hosts: Path
    process: subprocess.Popen[bytes]

    def sessions(self) -> list[int]:
        """Processes that serve a connection now."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in listed.stdout.split()]


def make_key(path: Path) -> Path:
    arguments = ["-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run([tool("ssh-keygen"), *arguments], check=True, timeout=30)
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_sshd(folder: Path, **environment: object) -> Sshd:
    """An sshd that lets one new key in; its sessions find `environment`, and nobody's ~/.bashrc."""
    for name in NEEDED:
        tool(name)
    folder.mkdir()
    environment = {"HOME": folder, **environment}
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd gives up its privileges
    port, host_key, key = free_port(), make_key(folder / "host"), make_key(folder / "a key")
    shutil.copy(folder / "a key.pub", folder / "authorized")
    lines = (
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {folder / 'authorized'}",
        "PidFile none",
        "UsePAM no",
        "StrictModes no",  # temporary folders belong to nobody's home
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "SetEnv " + " ".join(f'"{name}={value}"' for name, value in environment.items()),
    )
    (folder / "config").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [tool("sshd"), "-D", "-e", "-f", str(folder / "config")]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    wait_for(lambda: process.poll() is not None or is_listening(port), "sshd")
    assert process.poll() is None, log.read_text(encoding="utf-8")
    return Sshd(port=port, key=key, known_hosts=folder / "known", process=process)


def stop_sshd(sshd: Sshd) -> None:
    for pid in [*sshd.sessions(), sshd.process.pid]:
        os.kill(pid, signal.SIGTERM)
    sshd.process.wait(timeout=30)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    running = start_sshd(tmp_path_factory.mktemp("remote") / "sshd")
    yield running
    stop_sshd(running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A tree here, and the folder over there that it goes to."""

    tree: Path
    there: Path

    def command(self, *arguments: str) -> list[str]:
        return [tool("bash"), str(self.tree / "scripts" / "remote.sh"), *arguments]

    def remote(
        self, *arguments: str, path: Path | None = None, patience_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ) | ({"PATH": str(path)} if path else {})
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
            cwd=self.tree.parent,  # the script finds its tree by itself
            env=environment,
        )

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """In a process group of its own, in which Ctrl-C is not ignored."""
        interruptible = (
            "import os, signal, sys\n"
            "signal.signal(signal.SIGINT, signal.SIG_DFL)\nos.execv(sys.argv[1], sys.argv[1:])"
        )
        return subprocess.Popen(
            [sys.executable, "-c", interruptible, *self.command(*arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def configure(self, **settings: object) -> None:
        """scripts/remote.env; what is None is left out."""
        lines = []
        for name, value in settings.items():
            words = shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))
            lines.append(f"{name}=({words})" if isinstance(value, list) else f"{name}={words}")
        text = "\n".join(line for line in lines if not line.endswith("=None")) + "\n"
        (self.tree / "scripts" / "remote.env").write_text(text, encoding="utf-8")

    def equip(self) -> None:
        """What setup leaves behind, without the minutes it takes."""
        venv = self.there / ".remote" / "venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(Path(sys.executable).resolve())
        pinned = (self.tree / "requirements.txt").read_bytes()
        checksum = subprocess.run(["cksum"], input=pinned, capture_output=True, check=True).stdout
        (venv / ".complete").write_bytes(checksum)


def settings_of(sshd: Sshd) -> dict[str, object]:
    hosts = f"UserKnownHostsFile={shlex.quote(str(sshd.known_hosts))}"
    return {
        "REMOTE_HOST": "127.0.0.1",
        "REMOTE_PORT": sshd.port,
        "REMOTE_USER": pwd.getpwuid(os.geteuid()).pw_name,
        "REMOTE_KEY": sshd.key,
        "REMOTE_SSH_OPTIONS": ["-F", "none", "-o", hosts],
    }


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A small tree with a benchmark that writes down what it was given; not configured yet."""
    tree = tmp_path / "our tree"
    (tree / "scripts").mkdir(parents=True)
    (tree / "nanoserve").mkdir()
    shutil.copy(SCRIPT, tree / "scripts")
    (tree / "nanoserve" / "bench.py").write_text(BENCH, encoding="utf-8")
    (tree / "requirements.txt").write_text("--editable .\n", encoding="utf-8")
    (tree / ".gitignore").write_text("*.secret\nbuild/\nresults/**/*-quick*\n", encoding="utf-8")
    return Box(tree=tree, there=tmp_path / "their box, it's new")


@pytest.fixture
def ready(box: Box, sshd: Sshd) -> Box:
    """`box` over `sshd`, with an environment."""
    box.configure(**settings_of(sshd), REMOTE_DIR=box.there)
    box.equip()
    return box


def waiting_job(gate: Path) -> tuple[str, ...]:
    """`run` of a command that says "begun", waits for `gate`, records and ends with 3."""
    script = (
        f"echo begun; while [ ! -e {shlex.quote(str(gate))} ]; do sleep 0.05; done; "
        "mkdir -p results/box; echo '{\"late\": 1}' >>results/box/late.jsonl; echo done; exit 3"
    )
    return ("run", "sh", "-c", script)


# ------------------------------------------------------------------------------- before any machine


def test_help_names_every_command(box: Box) -> None:
    done = box.remote("--help")
    assert done.returncode == 0
    assert not done.stderr
    for command in ("setup", "bench", "run", "fetch", "attach", "stop", "remote.env"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "usage:"),
        (("launch",), "there is no command launch: setup, bench, run, fetch"),
        (("bench",), "bench what?"),
        (("run",), "run what?"),
        (("setup", "now"), "setup takes no arguments, got: now"),
        (("fetch",), "copy scripts/remote.env.example to scripts/remote.env"),
        (("--env",), "--env needs a file"),
        (("--env", "/nowhere/box.env", "fetch"), "there is no /nowhere/box.env"),
    ],
)
def test_a_wrong_request_is_said_to_be_one(
    box: Box, arguments: tuple[str, ...], words: str
) -> None:
    done = box.remote(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "REMOTE_HOST is not set"),
        ({"REMOTE_HOST": "x", "REMOTE_TORCH": "new"}, "REMOTE_TORCH is auto or pinned, got new"),
        ({"REMOTE_HOST": "x", "REMOTE_KEY": "/nowhere/key"}, "there is no key /nowhere/key"),
    ],
)
def test_a_wrong_environment_file_is_said_to_be_one(
    box: Box, settings: dict[str, object], words: str
) -> None:
    box.configure(**settings)
    done = box.remote("fetch")
    assert done.returncode == 2
    assert words in done.stderr


def test_the_example_is_a_complete_environment_file() -> None:
    example = ROOT / "scripts" / "remote.env.example"
    text = example.read_text(encoding="utf-8")
    subprocess.run(["bash", "-euc", 'source "$1"; [ "$REMOTE_HOST" ]', "-", example], check=True)
    used = set(re.findall(r"\bREMOTE_[A-Z_]+", SCRIPT.read_text(encoding="utf-8")))
    assert used == set(re.findall(r"(?m)^(?:# )?(REMOTE_[A-Z_]+)=", text))


@needs_sshd
def test_the_shell_is_clean() -> None:
    files = [str(SCRIPT), f"{SCRIPT.with_suffix('.env.example')}"]
    done = subprocess.run(
        [tool("shellcheck"), *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------------------- what arrives


@needs_sshd
def test_bench_arrives_word_for_word_and_its_records_come_back(ready: Box) -> None:
    done = ready.remote("bench", "all", "--device", "cuda", *AWKWARD)
    assert done.returncode == 0, done.stderr
    wanted = ["all", "--device", "cuda", *AWKWARD]
    assert json.loads(done.stdout.partition("argv ")[2]) == wanted
    records = ready.tree / "results" / "box" / "kvcache-stub.jsonl"
    assert [json.loads(line) for line in records.read_text().splitlines()] == [{"argv": wanted}]
    (log,) = (ready.tree / ".remote" / "jobs").glob("*/log")
    assert log.read_text(encoding="utf-8") == done.stdout


@needs_sshd
def test_run_gives_words_to_the_command_and_its_exit_code_back(ready: Box) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(255)"
    done = ready.remote("run", "python", "-c", code, *AWKWARD)
    assert json.loads(done.stdout) == list(AWKWARD)
    assert done.returncode == 255  # which ssh also uses for itself
    assert "the remote command ended with 255" in done.stderr
    assert ready.remote("run", "no-such-program").returncode == 127
    assert ready.remote("bench", "kvcache", "--exit", "3").returncode == 3


@needs_sshd
def test_the_tree_goes_as_it_is_and_what_git_ignores_stays(ready: Box) -> None:
    for name in ("new.py", "gone.py", "a.secret", "build/big", ".git/HEAD", ".git/config"):
        (ready.tree / name).parent.mkdir(exist_ok=True)
        (ready.tree / name).write_text(name)
    (ready.there / "build").mkdir()
    (ready.there / "build" / "theirs").touch()
    assert ready.remote("run", "true").returncode == 0
    (ready.tree / "gone.py").unlink()
    (ready.tree / "new.py").write_text("edited, of the same size or not")
    assert ready.remote("run", "true").returncode == 0
    files = {p.relative_to(ready.there).as_posix() for p in ready.there.rglob("*") if p.is_file()}
    ours = {name for name in files if not name.startswith((".remote/", "scripts/remote.sh"))}
    expected = {"nanoserve/bench.py", "requirements.txt", ".gitignore", "new.py", ".git/HEAD"}
    assert ours == expected | {"build/theirs"}
    assert (ready.there / "new.py").read_text() == "edited, of the same size or not"


@needs_sshd
def test_records_are_added_to_and_never_replaced(ready: Box) -> None:
    ours = ready.tree / "results" / "box" / "kvcache-stub.jsonl"
    ours.parent.mkdir(parents=True)
    ours.write_text('{"ours": 1}\n{"ours": 2}\n')
    assert ready.remote("bench", "kvcache").returncode == 0  # continues the file, as --resume would
    theirs = ready.there / "results" / "box" / ours.name
    assert theirs.read_text().splitlines() == ours.read_text().splitlines()
    with theirs.open("a") as file:
        file.write('{"theirs": 1}\n{"torn')
    with ours.open("a") as file:
        file.write('{"ours": 3}\n{"torn here')
    (theirs.parent / "trace-quick.json").write_text("quick ones come, too")
    assert ready.remote("fetch").returncode == 0
    assert [json.loads(line) for line in ours.read_text().splitlines()] == [
        *({"ours": 1}, {"ours": 2}, {"argv": ["kvcache"]}, {"ours": 3}, {"theirs": 1})
    ]
    assert (ours.parent / "trace-quick.json").is_file()
    before = theirs.read_text()
    assert ready.remote("run", "true").returncode == 0
    assert theirs.read_text() == before


@needs_sshd
@pytest.mark.parametrize("folder", ["/tmp/x", "mine", "results/../mine"])
def test_bench_refuses_a_folder_that_would_not_come_back(ready: Box, folder: str) -> None:
    done = ready.remote("bench", "kvcache", "--out", folder)
    assert done.returncode == 2
    assert f"--out {folder}: only results/" in done.stderr
    assert ready.remote("bench", "kvcache", f"--out={folder}").returncode == 2
    assert ready.remote("bench", "kvcache", "--out", "results/h200").returncode == 0


# ---------------------------------------------------------------------------------- what goes wrong


@needs_sshd
def test_bench_wants_the_environment_of_these_requirements(ready: Box) -> None:
    (ready.tree / "requirements.txt").write_text("--editable .\nnumpy\n")
    done = ready.remote("bench", "kvcache")
    assert done.returncode == 1
    assert "requirements.txt has changed since setup: run setup again" in done.stderr
    shutil.rmtree(ready.there / ".remote" / "venv")
    assert "there is no environment yet: run setup" in ready.remote("bench", "kvcache").stderr
    assert ready.remote("run", "true").returncode == 0


@needs_sshd
@pytest.mark.parametrize(
    "python, words",
    [("no-python", "there is no no-python: name Python 3.11"), ("false", "is too old: name")],
)
def test_setup_says_which_python_it_lacks(box: Box, sshd: Sshd, python: str, words: str) -> None:
    box.configure(**settings_of(sshd), REMOTE_DIR=box.there, REMOTE_PYTHON=python)
    done = box.remote("setup")
    assert done.returncode == 1
    assert words in done.stdout


@needs_sshd
def test_a_machine_that_cannot_be_reached(box: Box, sshd: Sshd) -> None:
    box.configure(**settings_of(sshd) | {"REMOTE_PORT": free_port()})
    done = box.remote("bench", "kvcache")
    assert done.returncode == 255
    assert "127.0.0.1 cannot be reached: check REMOTE_HOST, REMOTE_PORT" in done.stderr
    assert "Connection refused" in done.stderr


@needs_sshd
def test_a_key_that_is_not_let_in(box: Box, sshd: Sshd, tmp_path: Path) -> None:
    box.configure(**settings_of(sshd) | {"REMOTE_KEY": make_key(tmp_path / "other")})
    done = box.remote("bench", "kvcache")
    assert done.returncode == 255
    assert "127.0.0.1 refuses us: check REMOTE_USER and REMOTE_KEY" in done.stderr


@needs_sshd
def test_a_machine_that_is_another_one_now(box: Box, sshd: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{sshd.port} {other[0]} {other[1]}\n")
    options = ["-F", "none", "-o", f"UserKnownHostsFile={known}"]
    box.configure(**settings_of(sshd) | {"REMOTE_SSH_OPTIONS": options})
    done = box.remote("fetch")
    assert done.returncode == 255
    assert "shows another host key than before" in done.stderr
    assert "ssh-keygen -R" in done.stderr


def path_without(folder: Path, *missing: str) -> Path:
    """A folder for PATH with all the usual programs but `missing`."""
    folder.mkdir()
    for place in ("/bin", "/usr/bin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if program.name not in missing and not link.exists():
                link.symlink_to(program)
    return folder


@needs_sshd
def test_rsync_is_missing_here(ready: Box, tmp_path: Path) -> None:
    done = ready.remote("fetch", path=path_without(tmp_path / "bin", "rsync"))
    assert done.returncode == 1
    assert "this machine lacks rsync (apt-get install" in done.stderr


@needs_sshd
def test_rsync_is_missing_there(box: Box, tmp_path: Path) -> None:
    programs = path_without(tmp_path / "bin", "rsync", "flock")
    poor = start_sshd(tmp_path / "poor", PATH=programs)
    try:
        box.configure(**settings_of(poor), REMOTE_DIR=box.there)
        done = box.remote("bench", "kvcache")
        assert done.returncode == 1
        assert "on 127.0.0.1: it lacks rsync flock (Debian, Ubuntu: apt-get install" in done.stderr
    finally:
        stop_sshd(poor)


@needs_sshd
def test_a_folder_that_is_not_ours_is_left_alone(box: Box, sshd: Sshd) -> None:
    box.there.mkdir()
    (box.there / "thesis.tex").touch()
    box.configure(**settings_of(sshd), REMOTE_DIR=box.there)
    done = box.remote("run", "true")
    assert done.returncode == 1
    assert "holds other things: name a new one in REMOTE_DIR" in done.stderr
    assert [path.name for path in box.there.iterdir()] == ["thesis.tex"]


# ------------------------------------------------------------------------------ what outlasts a run


@needs_sshd
def test_a_lost_connection_loses_nothing(ready: Box, sshd: Sshd, tmp_path: Path) -> None:
    gate = tmp_path / "the gate"
    ours = ready.begin(*waiting_job(gate))
    assert ours.stdout
    assert ours.stdout.readline() == "begun\n"  # streamed, while the job goes on
    refused = ready.remote("run", "true")
    assert refused.returncode == 75
    assert "is running there: attach, stop, or wait" in refused.stderr
    assert "is still running: attach follows it" in ready.remote("fetch").stderr
    for pid in sshd.sessions():
        os.kill(pid, signal.SIGKILL)
    _, errors = ours.communicate(timeout=PATIENCE_S)
    assert ours.returncode == 255
    assert "the connection was lost; job" in errors
    gate.touch()
    attached = ready.remote("attach")
    assert (attached.returncode, attached.stdout) == (3, "begun\ndone\n")
    assert (ready.tree / "results" / "box" / "late.jsonl").read_text() == '{"late": 1}\n'
    assert "ended with 3" in ready.remote("fetch").stderr


@needs_sshd
def test_ctrl_c_ends_the_command_over_there(ready: Box, tmp_path: Path) -> None:
    ours = ready.begin(*waiting_job(tmp_path / "never"))
    assert ours.stdout
    assert ours.stdout.readline() == "begun\n"
    onlooker = ready.begin("attach")
    assert onlooker.stdout
    assert onlooker.stdout.readline() == "begun\n"
    os.killpg(onlooker.pid, signal.SIGINT)
    onlooker.communicate(timeout=PATIENCE_S)
    assert "is still running" in ready.remote("fetch").stderr
    os.killpg(ours.pid, signal.SIGINT)
    _, errors = ours.communicate(timeout=PATIENCE_S)
    assert ours.returncode == 130, errors
    assert "ended with 130" in ready.remote("fetch").stderr
    assert ready.remote("run", "true").returncode == 0  # nothing runs there any more


@needs_sshd
def test_stop_ends_a_job_that_somebody_left(ready: Box, sshd: Sshd, tmp_path: Path) -> None:
    assert "no job is running there" in ready.remote("stop").stderr
    ours = ready.begin(*waiting_job(tmp_path / "never"))
    assert ours.stdout
    assert ours.stdout.readline() == "begun\n"
    os.killpg(ours.pid, signal.SIGKILL)
    ours.communicate(timeout=PATIENCE_S)
    done = ready.remote("stop")
    assert done.returncode == 0, done.stderr
    assert "was stopped" in done.stderr
    assert ready.remote("attach").returncode == 130


@needs_sshd
def test_a_job_that_was_killed_is_said_to_be(ready: Box) -> None:
    done = ready.remote("run", "bash", "-c", "kill -KILL -- -$(cat .remote/jobs/*/pid)")
    assert done.returncode == 1
    assert "ended without an exit code: it was killed" in done.stderr
    assert "ended without an exit code" in ready.remote("fetch").stderr


@needs_sshd
def test_there_is_nothing_to_fetch_or_follow_yet(box: Box, sshd: Sshd) -> None:
    box.configure(**settings_of(sshd), REMOTE_DIR=box.there)
    done = box.remote("fetch")
    assert (done.returncode, "no job has run there yet" in done.stderr) == (0, True)
    assert box.remote("attach").returncode == 2


@needs_sshd
def test_through_a_jump_host_and_another_environment_file(ready: Box, sshd: Sshd) -> None:
    config = ready.tree.parent / "ssh_config"  # ssh itself does not quote it for the jump
    config.write_text(
        f'Host *\nIdentityFile "{sshd.key}"\nIdentitiesOnly yes\nStrictHostKeyChecking accept-new\n'
        f'UserKnownHostsFile "{sshd.known_hosts}"\nBatchMode yes\n'
        f"Host box\nHostName 127.0.0.1\nPort {sshd.port}\n"
    )
    user = pwd.getpwuid(os.geteuid()).pw_name
    ready.configure(
        REMOTE_HOST="box",
        REMOTE_JUMP=f"{user}@localhost:{sshd.port}",
        REMOTE_SSH_OPTIONS=["-F", str(config)],
        REMOTE_DIR=ready.there,
    )
    other = (ready.tree / "scripts" / "remote.env").rename(ready.tree / "other.secret")
    done = ready.remote("--env", str(other), "run", "sh", "-c", "echo $SSH_CONNECTION; exit 4")
    assert done.returncode == 4, done.stderr
    assert done.stdout.split()[2:] == ["127.0.0.1", str(sshd.port)]


# ----------------------------------------------------------------------------------- the real thing


@pytest.fixture
def offline_sshd(tmp_path: Path) -> Iterator[Sshd]:
    """Whoever logs in here installs nothing from a network and has a cache of their own.

    And no compiler: a native core takes a minute, and tests/test_packaging.py builds it.
    """
    cache = tmp_path / "cache"  # or `bench ceilings` would keep what it finds
    running = start_sshd(tmp_path / "offline", PIP_NO_INDEX=1, CXX="false", XDG_CACHE_HOME=cache)
    yield running
    stop_sshd(running)


def copy_of_this_tree(folder: Path) -> Path:
    """What git would hold if everything was committed, without the records."""
    command = [tool("git"), "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file() and not name.startswith("results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@needs_sshd
def test_this_tree_is_set_up_there_and_measures(tmp_path: Path, offline_sshd: Sshd) -> None:
    """Every pin is met by the packages of this Python, as on an image that brings its own torch."""
    box = Box(tree=copy_of_this_tree(tmp_path / "tree"), there=tmp_path / "there")
    python = ROOT / os.environ.get("SERVER_PYTHON", sys.executable)
    box.configure(**settings_of(offline_sshd), REMOTE_DIR=box.there, REMOTE_PYTHON=python)
    setup = box.remote("setup", patience_s=300)
    assert setup.returncode == 0, setup.stdout + setup.stderr
    assert "torch is taken from" in setup.stdout
    assert "ready: torch" in setup.stdout
    done = box.remote("bench", "ceilings", "--quick", "--threads", "1", patience_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (box.tree / "results").glob("*/ceilings-*.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records[0]["kind"] == "run"
    assert records[-1]["status"] == "complete"
