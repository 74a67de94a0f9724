"""A virtual machine under QEMU: its shape, start, output and results."""

from __future__ import annotations

import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.vm.host import Unable

CONSOLE_LINES_SHOWN = 40
# No getty: units that wait for devices never start, because nothing announces devices to systemd here.
SYSTEMD = " begin=systemd systemd.getty_auto=no systemd.show_status=yes"
# Accelerator and processor: `max` is an AMD by default, which has no threads when emulated.
ACCELERATORS = {"tcg": ("tcg,thread=multi", "max,vendor=GenuineIntel"), "kvm": ("kvm", "host")}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sockets, each a NUMA node; cores per socket; threads per core; memory per node in MiB."""

    sockets: int
    cores: int
    threads: int = 1
    node_mib: int = 1024

    @property
    def cpus(self) -> int:
        """The number of logical CPUs."""
        return self.sockets * self.cores * self.threads

    def arguments(self) -> list[str]:
        """Return QEMU's options."""
        each = self.cores * self.threads
        words = ["-m", str(self.sockets * self.node_mib)]
        words += ["-smp", f"{self.cpus},sockets={self.sockets},cores={self.cores},threads={self.threads}"]
        for node in range(self.sockets):
            words += ["-object", f"memory-backend-ram,size={self.node_mib}M,id=memory{node}"]
            cpus = f"{node * each}-{node * each + each - 1}"
            words += ["-numa", f"node,nodeid={node},cpus={cpus},memdev=memory{node}"]
        return words


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to start: a shape, the folder with `vmlinuz` and `initramfs`, its layers, lowest first, and its disk.

    With `systemd`, systemd is its first process, and writes go to the disk.
    """

    shape: Shape
    kernel: Path
    layers: Sequence[Path]
    disk: Path
    accelerator: str
    systemd: bool = False

    def command(self, output_folder: Path) -> list[str]:
        """Return QEMU's command. The console goes to a file, port 1 to standard output, port 2 to a file."""
        names = [f"vd{chr(ord('a') + number)}" for number in range(len(self.layers) + 1)]
        # On a loaded computer the kernel takes a late timer for broken and panics, so the check is off.
        line = "console=ttyS0 quiet panic=-1 no_timer_check psi=1 mitigations=off"
        line += f" layers={':'.join(reversed(names[:-1]))} disk={names[-1]}{SYSTEMD if self.systemd else ''}"
        drives = [f"file={layer},if=virtio,format=raw,readonly=on" for layer in self.layers]
        drives.append(f"file={self.disk},if=virtio,format=raw")
        acceleration, processor = ACCELERATORS[self.accelerator]
        return [
            *("qemu-system-x86_64", "-accel", acceleration, "-cpu", processor, *self.shape.arguments()),
            *("-kernel", str(self.kernel / "vmlinuz"), "-initrd", str(self.kernel / "initramfs"), "-append", line),
            *("-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot"),
            *(word for drive in drives for word in ("-drive", drive)),
            *("-serial", f"file:{output_folder / 'console'}", "-device", "virtio-serial-pci"),
            *("-chardev", "file,id=words,path=/dev/stdout", "-device", "virtserialport,nr=1,chardev=words"),
            *("-chardev", f"file,id=results,path={output_folder / 'results.tar'}"),
            *("-device", "virtserialport,nr=2,chardev=results"),
        ]

    def run(self, output_folder: Path, seconds_max: float) -> Iterator[str]:
        """Start the machine and yield each line of its output until it is off. Raises `Unable` if it fails.

        Afterwards `results` unpacks its results.
        """
        output_folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            self.command(output_folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds_max, end)
        timer.start()
        try:
            for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\r\n")
        finally:
            timer.cancel()
            process.kill()
            status = process.wait()
        if late.is_set():
            raise Unable(f"the machine was stopped after {seconds_max:.0f} s; {console(output_folder)}")
        if not (output_folder / "results.tar").stat().st_size:
            raise Unable(f"the machine exited with status {status} and no results; {console(output_folder)}")


def results(output_folder: Path) -> Path:
    """Unpack a machine's results and return the folder."""
    with tarfile.open(output_folder / "results.tar") as archive:
        archive.extractall(output_folder, filter="data")
    return output_folder


def console(output_folder: Path) -> str:
    """Return the end of the kernel's console."""
    path = output_folder / "console"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"its console ({path}) ends with", *lines[-CONSOLE_LINES_SHOWN:]])


def new_disk(path: Path, mebibytes: int) -> Path:
    """Create an empty ext4 disk for data that outlives a machine."""
    with path.open("wb") as file:
        file.truncate(mebibytes << 20)
    environment = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    subprocess.run(["mkfs.ext4", "-q", path], check=True, env=environment)
    return path
