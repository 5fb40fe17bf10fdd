"""Builds what the machines boot: a root file system with systemd, the server and its tests, and Debian's kernels.

The root is Debian 12, made by debootstrap. Everything that needs a network is installed here, in a chroot, because the
machines have none. Steps that take minutes are done once; the project is copied for each run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.machines.guest import USER

REPOSITORY = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
RELEASE = "bookworm"
PACKAGES = (
    "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,uidmap,kmod,procps,iproute2,libcap2-bin,ca-certificates,"
    "python3,python3-venv"
)
PROGRAMS = ("debootstrap", "mke2fs")
IMAGE_SIZE = "4G"
NOT_INSTALLED = (
    *("contourpy", "gradio-client", "grpcio", "hf-xet", "jsonschema-rs", "kubernetes-validate", "matplotlib", "mypy"),
    *("numpy", "pillow", "ray", "ruff", "schemathesis", "sympy", "tensorboard", "trackio", "zizmor"),
)
"""Packages of requirements/test.txt that the tests in the machines do not import."""
UNIT = """\
[Unit]
Description=Tests of this machine
After=multi-user.target
[Service]
Type=exec
WorkingDirectory=/src
StandardOutput=file:/dev/{serial_port}
StandardError=inherit
ExecStart=/opt/rstar-sandbox/bin/python -m tests.machines.guest
ExecStopPost=/usr/bin/systemctl reboot --force --force
[Install]
WantedBy=multi-user.target
"""
"""A unit that runs the tests, and then ends the machine. Their output goes to the second serial port."""
INSTALL_PACKAGES = f"""
python3 -m venv /opt/rstar-sandbox
pip="/opt/rstar-sandbox/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps --require-hashes"
$pip --requirement /src/requirements/runtime.txt
awk '/^[a-z]/ {{skip = /^({"|".join(NOT_INSTALLED)})==/}} !skip' /src/requirements/test.txt >/tmp/test.txt
$pip --requirement /tmp/test.txt
useradd --create-home {USER}
systemctl mask getty.target serial-getty@ttyS0.service serial-getty@ttyAMA0.service systemd-timesyncd.service
systemctl enable machine.service
"""
INSTALL_PROJECT = """
# The tests import the installed package, and find its files in the checkout.
rm -rf /opt/rstar-sandbox/lib/python3*/site-packages/sandbox
/opt/rstar-sandbox/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps --no-index \
    --force-reinstall --no-build-isolation /src
rm -rf /src/sandbox /src/build
ln -s /opt/rstar-sandbox/lib/python3*/site-packages/sandbox /src/sandbox
test -x /opt/runtime/bin/python || /opt/rstar-sandbox/bin/rstar-sandbox runtime --path /opt/runtime
/opt/rstar-sandbox/bin/python -m compileall -q /src/bench /src/tests
"""


@dataclass(frozen=True)
class Architecture:
    """What the machines of an architecture differ in. Serial ports have Linux's names."""

    name: str
    """Name of the architecture in Debian, such as `arm64`."""
    qemu: str
    """The emulator, with its kind of machine and of processor."""
    packages: str
    """The packages of the emulator, and those by which this host runs the programs of a foreign root."""
    console: str
    serial_port: str
    """Linux's name of the serial port to which the tests write their output."""
    serial_device: str
    """QEMU's name of its device."""


class Kernel(NamedTuple):
    release: str
    """The release of Debian that has this kernel."""
    architecture: Architecture


_AMD64 = Architecture(
    "amd64", "qemu-system-x86_64 -machine q35 -cpu max", "qemu-system-x86", "ttyS0", "ttyS1", "isa-serial"
)
_ARM64 = Architecture(
    name="arm64",
    qemu="qemu-system-aarch64 -machine virt -cpu neoverse-n1",
    packages="qemu-system-arm qemu-user-static binfmt-support",
    console="ttyAMA0",
    serial_port="ttyS0",
    serial_device="pci-serial",
)
KERNELS = {
    "5.10": Kernel("bullseye", _AMD64),
    "6.1": Kernel("bookworm", _AMD64),
    "6.12": Kernel("trixie", _AMD64),
    "6.1-arm64": Kernel("bookworm", _ARM64),
    "6.12-arm64": Kernel("trixie", _ARM64),
}
"""By version."""


def build(work: Path, architecture: Architecture, versions: Iterable[str]) -> tuple[Path, dict[str, Path]]:
    """Return the image of an architecture's root file system, and for each version the file of its kernel."""
    programs = (*PROGRAMS, architecture.qemu.split()[0])
    if missing := [name for name in programs if shutil.which(name) is None]:
        sys.exit(
            f"machines: expected the programs {', '.join(programs)}; install {', '.join(missing)} "
            f"(apt-get install debootstrap e2fsprogs {architecture.packages})"
        )
    work.mkdir(parents=True, exist_ok=True)
    root = work / "root"
    if not (work / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        _log(f"debootstrap of {architecture.name}")
        options = [f"--arch={architecture.name}", "--variant=minbase", f"--include={PACKAGES}"]
        _run("debootstrap", *options, RELEASE, str(root), MIRROR)
        _prepare_network(root)
        _copy_project(root)
        (root / "etc/systemd/system/machine.service").write_text(UNIT.format(serial_port=architecture.serial_port))
        (root / "etc/hostname").write_text("machine\n")
        _log("packages")
        _in_root(root, INSTALL_PACKAGES)
        (work / "complete").touch()
    kernels = {version: _kernel(work, root, version) for version in versions}
    _copy_project(root)
    _log("the project")
    _in_root(root, INSTALL_PROJECT)
    image = work / "root.img"
    image.unlink(missing_ok=True)
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(image), IMAGE_SIZE)
    return image, kernels


def _prepare_network(root: Path) -> None:
    """Give programs in the root the sources of all kernels, and the resolver and certificates of this host."""
    releases = dict.fromkeys([RELEASE, *(kernel.release for kernel in KERNELS.values())])
    (root / "etc/apt/sources.list").write_text("".join(f"deb {MIRROR} {release} main\n" for release in releases))
    for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt", "etc/pip.conf"):
        if Path("/", name).exists():
            shutil.copy(Path("/", name), root / name)
    _in_root(root, "apt-get update -qq")


def _copy_project(root: Path) -> None:
    """Copy the files of the checkout that git knows, as they are in the working tree."""
    source = root / "src"
    shutil.rmtree(source, ignore_errors=True)
    git = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)


def _kernel(work: Path, root: Path, version: str) -> Path:
    """Return the newest kernel of a version. It has all drivers that the machines need, so they need no modules."""
    directory = work / f"linux-{version}"
    if not directory.exists():
        _log(f"Linux {version}")
        number = re.escape(version.partition("-")[0])
        pattern = f"^linux-image-{number}[.].*-cloud-{KERNELS[version].architecture.name}$"
        found = _in_root(root, f"apt-cache search --names-only '{pattern}'")
        names = [line.split()[0] for line in found.splitlines()]
        newest = max(names, key=lambda name: [*map(int, re.findall(r"\d+", name))])
        _in_root(root, f"cd /var/cache/apt/archives && apt-get download -qq {newest} 2>/dev/null")
        (package,) = (root / "var/cache/apt/archives").glob(f"{newest}_*.deb")
        _run("dpkg-deb", "-x", str(package), str(directory))
        package.unlink()
    (kernel,) = (directory / "boot").glob("vmlinuz-*")
    return kernel


def _in_root(root: Path, script: str) -> str:
    """Run a shell script in the root, with the environment of this process. Return its output."""
    return _run("chroot", str(root), "sh", "-eu", "-c", script, HOME="/root", PATH="/usr/sbin:/usr/bin:/sbin:/bin")


def _run(*command: str, **environ: str) -> str:
    run = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"machines: {command[0]} ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.stdout


def _log(line: str) -> None:
    print(f"machines: {line}", file=sys.stderr, flush=True)
