"""Models by their name on Hugging Face: from the cache, or fetched from a stand-in of the hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.find import find_models
from hybrid.checkpoint.hub import HubName
from hybrid.convert import convert

COMMIT = "0123456789" * 4
REPO = "google/toy-3-it"


class Hub(ThreadingHTTPServer):
    """Serves the folder `files` as the repository REPO. cut: names whose first answer ends halfway."""

    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files, self.seen, self.cut, self.gated = files, list[str](), set[str](), False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> set[str]:
        return {
            line.split()[1].rpartition("/")[2] for line in self.seen if line.startswith("GET") and "/resolve/" in line
        }


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def refuse(self, code: int, why: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.seen.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        if hub.gated and self.headers.get("Authorization") != "Bearer hf_right":
            return self.refuse(403, "GatedRepo")
        if REPO not in path:
            return self.refuse(404, "RepoNotFound")
        kind = next(k for k in ("resolve", "revision", "tree") if f"/{k}/" in path)
        revision, _, name = path.partition(f"/{kind}/")[2].partition("/")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        there = {p.relative_to(hub.files).as_posix(): p.stat().st_size for p in hub.files.rglob("*") if p.is_file()}
        if kind == "tree":
            rows = [{"type": "file", "path": p, "size": n, "oid": f"{p}-{n}"} for p, n in there.items()]
            return self.answer(json.dumps(rows).encode(), "api")
        if kind == "revision":
            siblings = [{"rfilename": p} for p in there]
            return self.answer(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), "api")
        if not (hub.files / name).is_file():
            return self.refuse(404, "EntryNotFound")
        self.answer((hub.files / name).read_bytes(), name)

    def answer(self, body: bytes, name: str) -> None:
        begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if begin else 200)
        for key, value in {
            "Content-Type": "application/json" if name == "api" else "application/octet-stream",
            "Content-Length": len(body) - begin,
            "ETag": f'"{name}-{len(body)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            **({"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"} if begin else {}),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.server.cut:
            self.server.cut.remove(name)
            self.wfile.write(body[begin : len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body[begin:])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_hf(tmp_path_factory.mktemp("hub") / "repo", tiny())
    for other in ("README.md", "pytorch_model.bin", "model-q4_0.gguf", "onnx/model.onnx"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"x")
    with open_checkpoint(folder) as source:
        convert(source, folder / "model-q8_0.gguf", "q8_0")
    return folder


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants", reason="no huggingface_hub: pip install '.[hub]'")
    server = Hub(files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cache = tmp_path / "cache"
    of_a_file = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": of_a_file,
        "HF_HUB_CACHE": str(cache),
    }.items():
        monkeypatch.setattr(constants, name, value)  # read from the environment at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_a_repository_is_fetched_once_and_only_what_is_read(hub: Hub, files: Path) -> None:
    hub.cut = {"model.safetensors"}
    with open_checkpoint(REPO) as found, open_checkpoint(files) as wanted:
        assert found.name == "toy-3-it" and found.names == wanted.names
        assert found.tokenizer.encode("a b") == wanted.tokenizer.encode("a b")
        assert (
            found.tensor("token_embd.weight").parts[0].tobytes()
            == wanted.tensor("token_embd.weight").parts[0].tobytes()
        )
    assert not hub.cut  # the library asked again
    assert {"config.json", "model.safetensors"} < hub.fetched()
    assert not hub.fetched() & {"README.md", "pytorch_model.bin", "model-q8_0.gguf", "model.onnx"}
    hub.seen.clear()
    for name in (REPO, f"{REPO}@main", f"{REPO}@{COMMIT}", Path(REPO)):
        open_checkpoint(name).close()
    assert hub.seen == []
    (found_model,) = find_models(lambda path: None)
    assert (found_model.kind, found_model.name) == ("Hugging Face", REPO)


def test_a_gguf_file_of_a_repository(hub: Hub, files: Path) -> None:
    with open_checkpoint(f"{REPO}@main:model-q8_0.gguf") as found:
        assert found.path.name == "model-q8_0.gguf" and hub.fetched() == {"model-q8_0.gguf"}
    (found_model,) = find_models(lambda path: None)
    open_checkpoint(found_model.name).close()
    assert found_model.name == f"{REPO}:model-q8_0.gguf"
    with pytest.raises(
        CheckpointError, match=f"no such file; name a file of it: {REPO}:model-q4_0.gguf, {REPO}:model-q8_0"
    ):
        open_checkpoint(f"{REPO}:other.gguf")


def test_a_path_that_exists_wins_and_one_below_a_folder_is_a_path(hub: Hub, files: Path, tmp_path: Path) -> None:
    (tmp_path / "google").mkdir()
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(REPO)
    (tmp_path / REPO).symlink_to(files)
    open_checkpoint(REPO).close()
    assert hub.seen == []


def test_refusals_are_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refusal(name: str) -> str:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(name)
        assert "\n" not in str(error.value) and str(error.value).startswith(f"{name}: ")
        return str(error.value)

    assert "the repository has no revision v9" in refusal(f"{REPO}@v9")
    assert f"nor a repository of {hub.url}" in refusal("google/toy-4")
    hub.gated = True
    assert f"accept the terms at {hub.url}/{REPO}" in refusal(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    open_checkpoint(f"{REPO}:model-q8_0.gguf").close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(REPO).endswith("not in the Hugging Face cache, and HF_HUB_OFFLINE forbids fetching it: unset it")
    open_checkpoint(f"{REPO}:model-q8_0.gguf").close()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'hybrid-kernels[hub]'" in refusal(REPO)


def test_a_cache_without_all_parts_is_not_believed(hub: Hub, files: Path, tmp_path: Path) -> None:
    open_checkpoint(REPO).close()
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    weights.unlink()
    hub.seen.clear()
    open_checkpoint(REPO).close()
    assert hub.seen


@pytest.mark.slow
def test_commands_take_names(hub: Hub) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run("hybrid.inspect", REPO, "--json"))["name"] == "toy-3-it"
    run("hybrid.generate", REPO, "--device", "cpu", "-n", "2", "--prompt", "a")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("a/b@refs/pr/1:x/y.gguf", HubName("a/b", "refs/pr/1", "x/y.gguf")),
        ("a/b.gguf", None),
        ("/a/b", None),
        ("./a", None),
        ("../a", None),
        ("a/b/c", None),
        ("a", None),
        ("a/b:../c.gguf", None),
        ("a/b@../../c", None),
        ("a/b:c.bin", None),
    ],
)
def test_what_can_be_a_name(text: str, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubName.of(text) == name and (name is None or str(name) == text)


def test_all_parts_of_a_split_file_are_wanted() -> None:
    parts = [f"q/m-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert HubName("a/b", file=parts[0]).wanted([*parts, "q/n-00001-of-00002.gguf"], None) == parts
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    with pytest.raises(CheckpointError, match=r"has no model-00002-of-00002\.safetensors"):
        HubName("a/b").wanted(
            ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"], index
        )
