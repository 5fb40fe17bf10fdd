"""Boots virtual machines one after another, tries the server in each, and writes a row for each into rows.json.

    python -m tests.machines [--work DIR] [--machines 6.1-root,6.12-user] [--parts doctor,mix] [--calls 2000]

Each machine has 2 cores and 2 GB, no network and no hardware but its disk, whose changes are dropped. QEMU emulates the
cores, which are about ten times slower; with `--accel kvm` it uses the host's. Building the image needs root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import arguments
from tests.machines import guest, image, report

MACHINES = {f"{version}-{set_up}": (version, set_up) for version in image.KERNELS for set_up in guest.SET_UPS}
"""By name: the version of the kernel and the set-up."""
QEMU = "-smp 2 -m 2G -nodefaults -no-reboot -display none -device nvme,drive=root,serial=root"
BOOT_OPTIONS = "root=/dev/nvme0n1 rw quiet nowatchdog mitigations=off"
"""Options of the kernel. Mitigations of the processor's faults would make the emulation several times slower."""
EMULATION = "tcg,thread=multi,tb-size=1024"
END_OF_CONSOLE_CHARS = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Boot the machines. Return exit code 1 if something does not hold in one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines", description="Tries the server in virtual machines."
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/machines"), help="directory for images, 5 GB each")
    parser.add_argument("--machines", type=_names_of(MACHINES), default=[*MACHINES], metavar="NAMES")
    parser.add_argument("--parts", type=_names_of(guest.PARTS), default=[*guest.PARTS], metavar="NAMES")
    parser.add_argument("--calls", type=arguments.count, default=2000, help="calls of the mix (default: 2000)")
    parser.add_argument("--accel", default=EMULATION, help="kvm where this host has it (default: emulated cores)")
    parser.add_argument("--timeout-s", type=float, default=7200, help="seconds for one machine (default: 7200)")
    args = parser.parse_args(argv)
    versions = dict.fromkeys(MACHINES[name][0] for name in args.machines)
    images = {}
    for architecture in dict.fromkeys(image.KERNELS[version].architecture for version in versions):
        own_versions = [version for version in versions if image.KERNELS[version].architecture is architecture]
        images[architecture] = image.build(args.work / architecture.name, architecture, own_versions)
    holds = True
    for name in args.machines:
        version, set_up = MACHINES[name]
        architecture = image.KERNELS[version].architecture
        disk, kernels = images[architecture]
        words = [f"set_up={set_up}", f"parts={','.join(args.parts)}", f"calls={args.calls}"]
        options = " ".join([*words, guest.KERNEL_OPTIONS.get(set_up, "")])
        row = boot(args.work / name, architecture, disk, kernels[version], options, args.accel, args.timeout_s)
        row = {"version": version, "set_up": set_up, **row}
        print(json.dumps({name: row}), flush=True)
        report.write_row(name, row)
        holds &= not any(report.problems(row))
    report.PAGE.write_text(report.page(report.read_rows()))
    return 0 if holds else 1


def boot(
    log: Path,
    architecture: image.Architecture,
    disk: Path,
    kernel: Path,
    options: str,
    accel: str,
    timeout_s: float,
) -> dict[str, Any]:
    """Boot one machine and wait for its end. Return its row, or a row with the problem."""
    log.mkdir(exist_ok=True)
    console, output = log / "console.log", log / "output.log"
    command = ["nice", "-n", "10", *architecture.qemu.split(), *QEMU.split(), "-accel", accel]
    command += ["-serial", f"file:{console}", "-chardev", f"file,id=output,path={output}"]
    command += ["-device", f"{architecture.serial_device},chardev=output", "-kernel", str(kernel)]
    command += ["-append", f"{BOOT_OPTIONS} console={architecture.console} {options}"]
    command += ["-drive", f"file={disk},format=raw,if=none,id=root,snapshot=on,cache=unsafe"]
    problem = ""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as qemu:
        try:
            problem = f"QEMU ended with {status}" if (status := qemu.wait(timeout_s)) else ""
        except subprocess.TimeoutExpired:
            problem = f"no end after {timeout_s:g} s"
        finally:
            qemu.kill()  # no effect on a process that has ended
    rows = [line for line in output.read_text(errors="replace").splitlines() if line.startswith(guest.ROW)]
    row = dict(json.loads(rows[-1].removeprefix(guest.ROW))) if rows else {}
    if not rows:
        end = console.read_text(errors="replace").strip()[-END_OF_CONSOLE_CHARS:]
        problem = f"the machine printed no row; {problem or 'it ended'}; its console ends with: {end}"
    return {**row, "problem": problem} if problem else row


def _names_of(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown name {unknown[0]!r}; expected some of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("machines: interrupted; rows of the finished machines are kept", file=sys.stderr)
        sys.exit(130)
