import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from oc20_files import old_record, write_lmdb
from tiny_run import error_of, printed

from molflt.commands.cli import main
from molflt.data.structures import download as module
from molflt.data.structures import open_dataset
from molflt.data.structures.download import GAME_NET, _unpack, download
from molflt.data.structures.sources import OC20_ARCHIVE, split_path

INNER = OC20_ARCHIVE.inner


class Handler(BaseHTTPRequestHandler):
    """Serves one archive; can cut connections or ignore ranges, and records requested ranges."""

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if self.path != f"/data/{server.name}":
            self.send_error(404)
            return
        part = bool(wanted) and server.ranges
        body = server.content[int(wanted[6:-1]) if part else 0 :]  # bytes=START-
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut.pop(0)] if server.cut else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.name, running.content = OC20_ARCHIVE.name, archive(tmp_path)
        running.ranges, running.asked = True, []
        running.cut = []  # bytes to send before dropping the connection, one entry per request
        running.url = f"http://127.0.0.1:{running.server_port}/data"
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def archive(tmp_path, names=("10k/train", "all/val_id", "all/val_ood_ads"), extra=()):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for number, name in enumerate(names):
            records = {str(i): old_record(10 * number + i) for i in range(2)}
            lmdb = write_lmdb(tmp_path / "made" / f"{number}.lmdb", records)
            tar.add(lmdb, f"{INNER}/{name}/data.lmdb")
            add(tar, f"{INNER}/{name}/data.lmdb-lock", b"lock")
        add(tar, "is2res_train_val_test_lmdbs/data/is2rs/all/train/data.lmdb", b"other task")
        for member, content in extra:
            add(tar, member, content)
    return file.getvalue()


def add(tar, member, content):
    entry = tarfile.TarInfo(member)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def md5(content):
    return hashlib.md5(content).hexdigest()


def get(server, directory, splits=("10k/train", "val_id"), **options):
    options.setdefault("md5", md5(server.content))
    download("oc20-is2re", directory, list(splits), base_url=server.url, **options)


def test_only_wanted_splits_are_unpacked_and_readable(server, tmp_path, capsys):
    target = tmp_path / "oc 20"
    words = ["data", "download", "oc20-is2re", str(target), "--splits", "10k/train", "val_id"]
    out = printed(capsys, *words, "--base_url", server.url, "--md5", md5(server.content)).out
    assert "0 bytes of it already downloaded" in out and f"free in {target}" in out
    assert f"data convert '{target}/is2re/10k/train/data.lmdb' FILE" in out
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert files == ["is2re/10k/train/data.lmdb", "is2re/all/val_id/data.lmdb"]
    assert [r.sid for r in open_dataset(split_path(target, "train"))] == [1000, 1001]
    assert [r.sid for r in open_dataset(split_path(target, "val_id"))] == [1010, 1011]
    out = printed(capsys, *words, "--base_url", server.url).out
    assert "already contains 10k/train, all/val_id" in out
    assert len(server.asked) == 1


def test_interrupted_connections_are_continued(server, tmp_path):
    size = len(server.content)
    server.cut = [1000, 0, 500, 0, 0]
    get(server, tmp_path / "a")
    expected = [None, "bytes=1000-", "bytes=1000-", "bytes=1500-", "bytes=1500-", "bytes=1500-"]
    assert server.asked == expected and size > 1500
    server.ranges, server.cut, server.asked = False, [1000], []  # starts over
    get(server, tmp_path / "b")
    assert server.asked == [None, "bytes=1000-"]
    assert (tmp_path / "b/is2re/10k/train/data.lmdb").is_file()


def test_wrong_md5_and_damaged_parts_are_refused(server, tmp_path):
    with pytest.raises(ValueError, match="expected md5 0000; got " + md5(server.content)):
        get(server, tmp_path / "a", md5="0000")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{OC20_ARCHIVE.name}.part").write_bytes(b"x" * 700)
    with pytest.raises(ValueError, match="the download was damaged"):
        get(server, tmp_path / "a")


def test_hostile_members_stay_outside(tmp_path):
    outside = tmp_path / "outside"
    extra = [(f"{INNER}/all/val_id/../../../../../../../outside", b"x"), (str(outside), b"x")]
    path = tmp_path / "some.tar.gz"
    path.write_bytes(archive(tmp_path, ["all/val_id"], extra))
    with pytest.raises(ValueError, match=f"{INNER}/10k/train"):
        _unpack(path, tmp_path / "in", ["10k/train"])
    assert not [path for path in (tmp_path / "in").rglob("*") if path.is_file()]
    _unpack(path, tmp_path / "in", ["all/val_id"])
    files = [str(p.relative_to(tmp_path / "in")) for p in (tmp_path / "in").rglob("*.*")]
    assert files == ["is2re/all/val_id/data.lmdb"] and not outside.exists()


def test_game_net_is_fetched_resumed_and_compared(server, tmp_path, capsys):
    path = tmp_path / GAME_NET.name
    server.name, server.content = GAME_NET.name, b"archive" * 1000
    sums = ["--base_url", server.url, "--md5", md5(server.content).upper()]
    words = ["data", "download", "game-net", str(tmp_path)]
    server.cut = [2000] + [0] * module._ATTEMPTS
    assert "run the same command again" in printed(capsys, *words, *sums, status=2).err
    assert main([*words, *sums]) == 0
    assert path.read_bytes() == server.content and server.asked[-1] == "bytes=2000-"
    line = error_of(capsys, *words, "--base_url", server.url)  # exists, but is not official
    assert f"{path}: expected md5 {GAME_NET.md5}; got" in line
