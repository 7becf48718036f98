"""Where a Mesa with RADV is, and a process started on it. Two are used: the machine's own, and Debian 13's unpacked
into build/mesa-trixie or, of an installation, into the user's cache (RADV of Debian 12 has no cooperative matrices): no
root, no chroot, its own ld-linux starts Python.

    python -m perf.mesa fetch      # about 57 MB from Debian's mirror, by apt

`fetch` needs nothing but Python: tools/setup.sh calls it while the rest is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.core.places import ROOT, cache_folder, in_clone

TRIXIE = (ROOT / "build" if in_clone() else cache_folder()) / "mesa-trixie"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mesa-vulkan-drivers", "libvulkan1")
FAMILIES = ("gfx1103_r1", "phoenix")  # what Mesa 22 and Mesa 25 call the Radeon 780M; a machine's own may be either
SYSTEM_ICDS = ("/usr/share/vulkan/icd.d/radeon_icd.x86_64.json", "/usr/share/vulkan/icd.d/radeon_icd.json")


@dataclass(frozen=True, slots=True)
class Mesa:
    """A usable RADV: its ICD file and the command prefix before `python`."""

    name: str
    icd: Path
    launcher: tuple[str, ...] = ()
    families: tuple[str, ...] = FAMILIES
    """Names of the Radeon 780M to try, in this order."""

    def table(self, share: int = 1, tables: Path = Path()) -> dict[str, Any]:
        """hybrid.perf.isa.radv's table from a process on this Mesa. RuntimeError with the driver's message."""
        said = ""
        for family in self.families:
            done = self._start(family, str(share), str(tables))
            if done.returncode == 0:
                return json.loads(done.stdout)
            said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"
            if "not RADV's null device" not in done.stderr and "family" not in done.stderr.lower():
                break
        raise RuntimeError(f"{self.name}: RADV's null device did not compile the kernels: {said}")

    def _start(self, family: str, *given: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "RADV_FORCE_FAMILY": family,
            "VK_DRIVER_FILES": str(self.icd),
            "VK_ICD_FILENAMES": str(self.icd),
        }
        env.pop("HYBRID_VULKAN_VALIDATION", None)
        # The interpreter itself, not a virtual environment's link: ld-linux would not find its modules.
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))])
        command = [*self.launcher, os.path.realpath(sys.executable), "-m", "hybrid.perf.isa.radv", *given]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def installed() -> list[Mesa]:
    """Every RADV here; empty where there is none."""
    found = [Mesa("the system's Mesa", Path(p)) for p in SYSTEM_ICDS if Path(p).exists()][:1]
    icd = TRIXIE / "usr/share/vulkan/icd.d/radeon_icd.json"
    if icd.exists():
        libraries = TRIXIE / "usr/lib/x86_64-linux-gnu"
        loader = TRIXIE / "usr/lib64/ld-linux-x86-64.so.2"
        found.append(Mesa("Debian 13's Mesa", icd, (str(loader), "--library-path", str(libraries)), FAMILIES[::-1]))
    return found


def version_of(driver: str) -> str:
    """`radv Mesa 25.0.7-2+deb13u1` -> `25.0.7`."""
    found = re.search(r"Mesa (\d+\.\d+\.\d+)", driver)
    if found is None:
        raise ValueError(f"no version of Mesa in {driver!r}")
    return found[1]


def fetch(folder: Path = TRIXIE) -> int:
    """Download Debian 13's packages with apt's own resolver and unpack them. RuntimeError with apt's message."""
    apt = folder.with_name(folder.name + "-apt")
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")  # as on a machine with nothing installed: every dependency is fetched
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} trixie main\n")
    (apt / "apt.conf").write_text(
        f'Dir::State "{apt}/state"; Dir::State::status "{apt}/status"; Dir::Cache "{apt}/cache";\n'
        f'Dir::Etc::sourcelist "{apt}/sources.list"; Dir::Etc::sourceparts "-"; Dir::Etc::preferencesparts "-";\n'
        'APT::Sandbox::User ""; APT::Architecture "amd64"; Acquire::Languages "none";\n'
    )
    env = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    options = ["-qq", "-o", "Debug::NoLocking=1"]
    download = ["install", "-y", "--no-install-recommends", "--download-only", *PACKAGES]
    for arguments in (["update"], download):
        done = subprocess.run(["apt-get", *options, *arguments], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"apt-get {arguments[0]} for Debian 13 failed: {done.stderr.strip().splitlines()[-1:]}")
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    print(f"Debian 13's Mesa is in {folder}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    from hybrid.cli import Parser, run

    p = Parser(
        prog="python -m perf.mesa", description="Debian 13's Mesa in build/, for compiling for gfx1103; what is here."
    )
    p.add_argument(
        "command", choices=("fetch", "list"), help="fetch: download and unpack it; list: every RADV that is here"
    )
    args: argparse.Namespace = p.parse_args(argv)
    if args.command == "fetch":
        return run(fetch)
    print("\n".join(f"{m.name}: {m.icd}" for m in installed()) or "no RADV is here: install mesa-vulkan-drivers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
