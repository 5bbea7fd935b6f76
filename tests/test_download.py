"""Downloads: gone on with, checked, and refused in one line."""

import hashlib

import pytest
from loopback import serving

from accelerated.data import named_sets as download
from accelerated.data.named_sets import check_file, fetch, file_checksum
from accelerated.errors import InputError

CONTENT = bytes(i % 251 for i in range(100_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serving({"/file": CONTENT}) as server:
        yield server


def test_a_file_is_fetched_whole(server, tmp_path):
    fetch(server.address + "/file", tmp_path / "deep" / "file", SHA256)
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]


def test_what_broke_off_is_gone_on_with(server, tmp_path):
    """Within one call and in the next: every connection ends after 30,000 bytes."""
    server.break_after = 30_000
    fetch(server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [part for _, part in server.asked] == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    server.asked.clear()
    (tmp_path / "again.part").write_bytes(CONTENT[:99_000])
    fetch(server.address + "/file", tmp_path / "again", SHA256)
    assert [part for _, part in server.asked] == ["bytes=99000-"] and (tmp_path / "again").read_bytes() == CONTENT


def test_a_download_that_keeps_breaking_off_is_kept(server, tmp_path):
    server.break_after = 10_000
    with pytest.raises(InputError, match=f"cannot fetch file .40000 of 100000 bytes came.; try again later, .* {SHA256}. at "):
        fetch(server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file.part").read_bytes() == CONTENT[:40_000] and not (tmp_path / "file").exists()


def test_a_server_that_sends_no_parts_is_asked_from_the_start(server, tmp_path):
    server.ranges = False
    (tmp_path / "file.part").write_bytes(b"something else")
    fetch(server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_whole_is_used(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_another_content_is_never_used(server, tmp_path):
    with pytest.raises(InputError, match=f"has sha256 {SHA256}, expected {'0' * 64}; try again") as caught:
        fetch(server.address + "/file", tmp_path / "file", "0" * 64)
    assert list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_server_that_is_not_there(server, tmp_path):
    for address, words in ((server.address + "/none", "Not Found"), ("http://127.0.0.1:9/file", "refused")):
        with pytest.raises(InputError, match=words) as caught:
            fetch(address, tmp_path / "file", SHA256)
        assert f"put a copy of {address} (sha256 {SHA256}) at {tmp_path / 'file'}" in str(caught.value)
    assert [path for path, _ in server.asked] == ["/none"], "what is not there is not asked for again"


def test_a_folder_that_cannot_be_written_to(server, tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(InputError, match=r"cannot write .*; free some space, or give another --data-dir"):
        fetch(server.address + "/file", tmp_path / "folder" / "file", SHA256)


def test_checksums(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    check_file(path, SHA256)
    assert file_checksum(path, "md5") == hashlib.md5(CONTENT).hexdigest()
    with open(path, "rb") as file:
        assert download.checksum_in_pieces(file, "sha256") == SHA256
    with pytest.raises(InputError, match="remove it to fetch it again"):
        check_file(path, "0" * 64)
