"""Images for a cluster without a registry or a container engine: debootstrap makes the base, buildah runs the real
Dockerfiles on it, and each image becomes one archive that every node imports.

An archive is named after everything that went into it, so one that exists is up to date.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ascend_package.package import ARCHIVE as VLLM_ASCEND
from chart.helm_binaries import ROOT, pip_command
from cluster.commands import run
from upstream.archives import Archive, unpacked

HERE = Path(__file__).resolve().parent
# libnuma is what the engine image would add by itself: with it here that image is built without a second download.
BASE_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
BUILD_SECONDS = 3600.0
IGNORED_FOLDERS = {"__pycache__", ".pytest_cache", "tests", "dist"}


@dataclass(frozen=True)
class Image:
    """name: as the chart asks for it. base: another image of ours that BASE becomes; None: Debian's. archive: another
    project's release in source form, which the Dockerfile copies from under that project's name."""

    name: str
    dockerfile: Path
    base: str | None = None
    archive: Archive | None = None

    @property
    def copied(self) -> list[str]:
        """Paths of the repository that its COPY instructions name."""
        text = self.dockerfile.read_text().replace("\\\n", " ")
        for name, default in re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE):
            text = text.replace(f"${{{name}}}", default)
        lines = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
        return [word for words in lines for word in words[:-1] if not word.startswith("--")]


def images(version: str) -> dict[str, Image]:
    docker, own = ROOT / "docker", HERE / "images"
    tools = f"spillway-tools:{version}"
    simulated, ascend = "spillway-engine-simulated:lane", "ascend-stand-in:lane"
    listed = [
        Image(f"spillway-gateway:{version}", docker / "gateway.Dockerfile"),
        Image(tools, docker / "tools.Dockerfile"),
        Image(f"spillway-engine:{version}-cpu", docker / "engine-cpu.Dockerfile"),
        Image(simulated, own / "engine-simulated.Dockerfile", tools),
        Image(ascend, own / "ascend-stand-in.Dockerfile", simulated, VLLM_ASCEND),
        Image(f"spillway-engine:{version}-ascend", docker / "engine-ascend.Dockerfile", ascend),
        Image("valkey:lane", own / "valkey.Dockerfile"),
    ]
    return {image.name: image for image in listed}


class ImageBuilder:
    """folder: where base, archives and buildah's own storage lie; nothing is written elsewhere."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self._images = images(version)
        self._keys: dict[str, str] = {}  # of what was found first: a file that is edited later changes no name midway
        self._temporary = folder / "temporary"

    def archive(self, name: str) -> Path:
        """A docker archive of the image, built now unless nothing in it has changed."""
        path = self.folder / f"{name.replace(':', '_')}-{self._key(name)}.tar"
        if not path.exists():
            shutil.rmtree(self._temporary, ignore_errors=True)  # gigabytes, where an earlier build was interrupted
            self._temporary.mkdir(parents=True)
            self._build(self._images[name])
            for old in self.folder.glob(f"{name.replace(':', '_')}-*.tar"):
                old.unlink()
            made = path.with_suffix(".partial")
            # Not an OCI archive, as buildah compresses the layers of those, for seconds each and for nothing.
            self._buildah("push", "--quiet", f"localhost/{name}", f"docker-archive:{made}:docker.io/library/{name}")
            made.rename(path)
            self._drop(name)
        return path

    def _drop(self, name: str) -> None:
        """Remove an image that its archive has too, and leftovers of builds: an engine leaves tens of gigabytes."""
        if all(image.base != name for image in self._images.values()):
            self._buildah("rmi", f"localhost/{name}")
        self._buildah("rmi", "--prune", check=False)

    def _key(self, name: str) -> str:
        if name not in self._keys:
            image = self._images[name]
            digest = hashlib.sha256(image.dockerfile.read_bytes())
            digest.update((self._key(image.base) if image.base else BASE_PACKAGES).encode())
            if image.archive:
                digest.update(image.archive.sha256.encode())
            for source in image.copied:
                for file in _files(ROOT / source):
                    digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
            self._keys[name] = digest.hexdigest()[:16]
        return self._keys[name]

    def _build(self, image: Image) -> None:
        if image.base:
            self._need(image.base)
            base = f"localhost/{image.base}"
        else:
            base = self._base
        command = ["bud", "--quiet", "--isolation", "chroot", "--network", "host", "--layers=false"]
        for volume in self._installer_volumes:
            command += ["--volume", volume]
        if image.archive:
            command += ["--build-context", f"{image.archive.project}={unpacked(image.archive)}"]
        command += ["--build-arg", f"BASE={base}", "-t", f"localhost/{image.name}", "-f", str(image.dockerfile)]
        self._buildah(*command, str(ROOT))

    def _need(self, name: str) -> None:
        """Load an image into buildah's own storage, where a Dockerfile finds it as a base."""
        archive = self.archive(name)
        present = self._buildah("images", "--quiet", "--filter", f"reference=localhost/{name}", check=False)
        if not present.strip():
            pulled = self._buildah("pull", "--quiet", f"docker-archive:{archive}").strip()
            self._buildah("tag", pulled, f"localhost/{name}")

    @cached_property
    def _base(self) -> str:
        name = "localhost/spillway-lane-base:" + hashlib.sha256(BASE_PACKAGES.encode()).hexdigest()[:12]
        if not self._buildah("images", "--quiet", "--filter", f"reference={name}", check=False).strip():
            root = self.folder / "debian"
            shutil.rmtree(root, ignore_errors=True)
            include = f"--include={BASE_PACKAGES}"
            run("debootstrap", "--variant=minbase", include, "bookworm", str(root), seconds=BUILD_SECONDS)
            for cached in (root / "var/cache/apt/archives").glob("*.deb"):
                cached.unlink()
            container = self._buildah("from", "scratch").strip()
            self._buildah("add", "--quiet", container, str(root), "/")
            path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            self._buildah("config", "--env", path, container)
            self._buildah("commit", "--quiet", "--rm", container, name)
            shutil.rmtree(root)
        return name

    @cached_property
    def _installer_volumes(self) -> list[str]:
        """The settings of this machine's pip, for the RUN instructions alone: no image keeps any of it."""
        listed = run(*pip_command(), "config", "list")
        settings: dict[str, str] = {}
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            settings[name.rsplit(".", 1)[-1]] = value.strip("'")
        known = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "proxy")
        kept = {name: settings[name] for name in known if settings.get(name)}
        volumes = []
        for name in ("cert", "find-links"):
            if name in kept and Path(kept[name]).exists():
                volumes.append(f"{kept[name]}:{kept[name]}:ro")
            elif name in kept and name == "find-links":
                del kept[name]
        if kept:
            config = self.folder / "pip.conf"
            config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in kept.items()))
            volumes.append(f"{config}:/etc/pip.conf:ro")
        return volumes

    def _buildah(self, *arguments: str, check: bool = True) -> str:
        storage = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "storage-run")]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self._temporary)}
        command = ["buildah", *storage, *arguments]
        return run(*command, seconds=BUILD_SECONDS, environment=environment, check=check)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = [path for path in source.rglob("*") if path.is_file()]
    return sorted(path for path in found if not IGNORED_FOLDERS & set(path.relative_to(source).parts))


if __name__ == "__main__":
    builder = ImageBuilder(Path(sys.argv[1]), sys.argv[2])
    for wanted in sys.argv[3:]:
        print(shlex.quote(str(builder.archive(wanted))), flush=True)
