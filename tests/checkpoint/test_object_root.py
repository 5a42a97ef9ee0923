"""Object stores through the real protocol: who wins a commit, what a failing store does to a save, and what was asked of it."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.s3 import S3, MotoServer, first, set_credentials
from tests.checkpoint.support import run_ranks

from keepstep.checkpoint.format.layout import INDEX_NAME, MARKER_SIGNED, MARKER_UNSIGNED, FolderName, rank_file_name
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.restore.quarantine import QuarantineRecord, quarantined, write_quarantine
from keepstep.checkpoint.restore.reader import VerifiedFile
from keepstep.checkpoint.restore.verify import check_file, check_files, read_manifest, verify_checkpoint
from keepstep.checkpoint.save.commit import writer_facts
from keepstep.checkpoint.storage import objects
from keepstep.checkpoint.storage.objects import CLAIMS, data_key, data_prefix
from keepstep.checkpoint.storage.source import Root, StoreOptions, open_deleter, open_root, parse_root
from keepstep.checkpoint.trust.keys import signing_key, trusted_public_key
from keepstep.checkpoint.trust.manifest import build_statement, sign_statement
from keepstep.records.errors import ConfigError, StorageError, VerificationError

NAME = FolderName(1200, 3, 1, 0, "job7")
FILE = rank_file_name(0, 2)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def committed(root: Root, name: FolderName = NAME, *, size: int = 3000) -> str:
    """A signed checkpoint of two ranks; the files are no shards, only bytes."""
    folder = root.make_folder(name)
    contents = {rank_file_name(rank, 2): noise(size, rank) for rank in range(2)} | {INDEX_NAME: b"{}"}
    files = [root.put_file(folder, file, [data[:100], memoryview(data)[100:]]) for file, data in contents.items()]
    facts = writer_facts(name, world=2, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    statement = build_statement(folder, files, facts, marker=MARKER_SIGNED)
    root.publish(folder, MARKER_SIGNED, sign_statement(statement, signing_key()))
    return folder


def test_what_was_written_is_what_is_read(s3: S3) -> None:
    root = s3.root()
    assert root.folders() == [] and list_checkpoints(root, trusted_key=None) == []
    folder = committed(root)
    assert folder == NAME.text and root.tier == "object" and root.where == f"s3://{s3.bucket}/team/ckpt"
    manifest = read_manifest(root, folder, trusted_key=trusted_public_key())
    check_files(root, folder, manifest)
    (entry,) = list_checkpoints(root, trusted_key=trusted_public_key())
    assert entry.candidate and entry.manifest == manifest
    files = {file.name: file for file in manifest.files}
    check_file(root, folder, files[INDEX_NAME])
    assert bytes(VerifiedFile.by_fact(root.open(folder, FILE), files[FILE]).read(0, 3000)) == noise(3000)
    opened = root.open(folder, FILE)
    part = bytearray(50)
    opened.read_into(memoryview(part), 77)
    assert bytes(part) == noise(3000)[77:127] and opened.size_bytes == 3000
    with pytest.raises(VerificationError, match=f"{FILE}: ends at byte 3000, expected 3010"):
        opened.read_into(memoryview(part), 2960)
    with pytest.raises(VerificationError, match=r"nothing\.bin: is missing"):
        root.open(folder, "nothing.bin")


def test_layout_is_the_documented_one(s3: S3) -> None:
    folder = committed(s3.root())
    digests = [hashlib.sha256(f"job7/{rank}".encode()).hexdigest()[:4] for rank in range(2)]
    assert sorted(s3.keys()) == sorted(
        [
            f"team/ckpt/{digests[0]}/{folder}/{rank_file_name(0, 2)}",
            f"team/ckpt/{digests[1]}/{folder}/{rank_file_name(1, 2)}",
            f"team/ckpt/{digests[0]}/{folder}/{INDEX_NAME}",
            f"team/ckpt/commits/{folder}/{MARKER_SIGNED}",
            f"team/ckpt/records/claims/{folder}.json",
        ]
    )


def test_keys_of_one_save_spread_over_prefixes() -> None:
    prefixes = {data_key(NAME.text, rank_file_name(rank, 4096)).split("/")[0] for rank in range(4096)}
    # 4096 draws from 65536: about 3971 different ones are expected.
    assert len(prefixes) > 3800 and all(len(prefix) == 4 for prefix in prefixes)
    assert data_key(NAME.text, INDEX_NAME).split("/")[0] == data_prefix("job7", 0)
    # The same from save to save: the store has split them already.
    later = FolderName(9999, 4, 2, 0, "job7").text
    assert data_key(later, FILE).split("/")[0] == data_key(NAME.text, FILE).split("/")[0]


def test_trainer_asks_for_nothing_but_put_get_and_list(s3: S3) -> None:
    root = s3.root()
    folder = committed(root)
    root.put_record("pins", "one", b"{}")
    verify_checkpoint(root, folder, trusted_key=trusted_public_key())
    assert {request.method for request in s3.requests} == {"PUT", "GET", "HEAD"}
    assert not any("x-amz-copy-source" in request.headers for request in s3.requests)
    puts = s3.of("PUT")
    assert all(request.headers["if-none-match"] == "*" for request in puts)
    assert all("x-amz-checksum-sha256" in request.headers for request in puts)


def test_two_writers_claim_two_folders(s3: S3) -> None:
    names = run_ranks(4, lambda rank: s3.root().make_folder(NAME))
    assert sorted(names) == [FolderName(1200, 3, 1, retry, "job7").text for retry in range(4)]
    assert set(s3.root().folders()) == set(names), "a folder that is not committed shows by its claim"
    assert list_checkpoints(s3.root(), trusted_key=None)[0].committed is False


def test_one_of_two_writers_commits(s3: S3) -> None:
    folder = s3.root().make_folder(NAME)
    results = run_ranks(4, lambda rank: s3.root().publish(folder, MARKER_SIGNED, b'{"writer": %d}' % rank))
    losers = [result for result in results if result is not None]
    assert len(losers) == 3
    assert all(isinstance(loser, StorageError) and "another writer committed" in str(loser) for loser in losers)
    winner = results.index(None)
    assert s3.root().marker(folder) == (MARKER_SIGNED, b'{"writer": %d}' % winner)
    with pytest.raises(StorageError, match=rf"another writer committed \({MARKER_SIGNED} is there"):
        s3.root().publish(folder, MARKER_UNSIGNED, b"{}")


def test_own_marker_whose_answer_was_lost_counts_as_committed(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    lost: list[str] = []

    def policy(method: str, key: str, number: int) -> Any:
        if method == "PUT" and "commits" in key and not lost:
            lost.append(key)
            return "lost"
        return None

    s3.policy = policy
    root.publish(folder, MARKER_SIGNED, b"mine")
    assert lost and root.marker(folder) == (MARKER_SIGNED, b"mine")
    assert [request.status for request in s3.of("PUT") if "commits" in request.key] == [0, 412]
    root.publish(folder, MARKER_SIGNED, b"mine")  # and a whole publish that is repeated


def test_permission_is_asked_before_every_try(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    s3.policy = lambda method, key, number: "slow" if "commits" in key and method == "PUT" else None
    asked: list[int] = []

    def lease() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise StorageError("the lease has run out")

    with pytest.raises(StorageError, match="the lease has run out"):
        root.publish(folder, MARKER_SIGNED, b"{}", may_publish=lease)
    assert len(asked) == 3 and root.marker(folder) is None


@pytest.mark.parametrize("fault", ["slow", pytest.param("broken", marks=pytest.mark.slow), "cut", "lost"])
def test_passing_failures_are_ridden_out(s3: S3, fault: Any) -> None:
    s3.policy = first(2, fault, "PUT", "GET", "HEAD")
    root = s3.root()
    folder = committed(root)
    assert verify_errors(root, folder) == []
    failed = [request for request in s3.requests if request.status in (0, 500, 503)]
    assert len(failed) >= 4


def verify_errors(root: Root, folder: str) -> list[str]:
    """Names of files whose bytes differ (these are no shards, so what is said about headers is left out)."""
    report = verify_checkpoint(root, folder, trusted_key=trusted_public_key())
    return [error for error in report.errors if "SHA-256" in error or "missing" in error]


def test_failure_that_does_not_pass_ends_in_bounded_time(s3: S3) -> None:
    root = s3.root(retry_for_s=0.6)
    folder = root.make_folder(NAME)
    s3.policy = lambda method, key, number: "slow" if method == "PUT" else None
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match=rf"cannot write s3://.*/{FILE}: 503 .*SlowDown: Please reduce"):
        root.put_file(folder, FILE, [noise(1000)])
    s3.policy = lambda method, key, number: "slow"
    with pytest.raises(StorageError, match=r"cannot list s3://.*/commits: 503 .*SlowDown"):
        root.folders()
    assert time.monotonic() - begun_s < 10.0
    s3.policy = lambda method, key, number: None
    assert root.files(folder) == {} and root.marker(folder) is None


def test_write_of_another_that_is_under_way_is_no_commit_of_another(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    begun = len(s3.of("PUT"))
    s3.policy = lambda method, key, number: "conflict" if method == "PUT" and number < begun + 2 else None
    root.publish(folder, MARKER_SIGNED, b"mine")
    assert [request.status for request in s3.of("PUT")[begun:]] == [409, 409, 200]


def test_store_that_never_answers_is_given_up(s3: S3) -> None:
    root = s3.root(request_timeout_s=0.3, retry_for_s=0.3)
    folder = root.make_folder(NAME)
    s3.policy = lambda method, key, number: "stall"
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match=rf"cannot write s3://.*/{FILE}: no answer"):
        root.put_file(folder, FILE, [b"x"])
    with pytest.raises(StorageError, match=r"cannot read s3://.*: no answer"):
        root.marker(folder)
    assert time.monotonic() - begun_s < 10.0


def test_byte_flipped_on_the_way_up_is_refused_by_the_store(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    s3.policy = lambda method, key, number: "flip" if method == "PUT" else None
    with pytest.raises(StorageError, match=r"400 .*BadDigest"):
        root.put_file(folder, FILE, [noise(1000)])
    assert root.files(folder) == {}


def test_nothing_is_overwritten(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    fact = root.put_file(folder, FILE, [noise(1000)])
    assert root.put_file(folder, FILE, [noise(1000)], sha256=fact.sha256) == fact, "our own repeated write"
    for other in (noise(1000, 1), noise(999)):
        with pytest.raises(StorageError, match="is there already with other content; nothing is overwritten"):
            root.put_file(folder, FILE, [other])
    with pytest.raises(StorageError, match="its bytes changed while they were written"):
        root.put_file(folder, INDEX_NAME, [b"{}"], sha256=fact.sha256)
    with pytest.raises(VerificationError, match="is not the name of a checkpoint's file"):
        root.put_file(folder, "../x", [b""])


def test_large_file_goes_up_in_parts_and_comes_down_in_ranges(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 20)
    root = s3.root()
    folder = root.make_folder(NAME)
    data = noise((12 << 20) + 77)
    fact = root.put_file(folder, FILE, [data[:1000], data[1000:]])
    assert (fact.size_bytes, fact.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    parts = [request for request in s3.of("PUT") if "partNumber" in request.query]
    assert [part.size_bytes for part in sorted(parts, key=lambda part: int(part.query["partNumber"][0]))] == [
        5 << 20,
        5 << 20,
        (2 << 20) + 77,
    ]
    buffer = bytearray(len(data) - 5)
    root.open(folder, FILE).read_into(memoryview(buffer), 5)
    assert buffer == data[5:]
    assert len([request for request in s3.of("GET") if "range" in request.headers]) == 3
    assert root.put_file(folder, FILE, [data]) == fact, "our own repeated write"
    with pytest.raises(StorageError, match="is there already with other content"):
        root.put_file(folder, FILE, [noise(len(data), 1)])


@pytest.fixture
def own_server() -> Iterator[MotoServer]:
    server = MotoServer()
    yield server
    server.close()


def test_server_killed_in_the_middle_of_an_upload(own_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 20)
    set_credentials(monkeypatch)
    s3 = S3(own_server)
    try:
        root = s3.root(retry_for_s=0.5)
        folder = root.make_folder(NAME)
        s3.policy = lambda method, key, number: "kill" if method == "PUT" and FILE in key and number == 2 else None
        begun_s = time.monotonic()
        with pytest.raises(StorageError, match=rf"cannot write s3://.*/{FILE}: (no answer|a part did not go)"):
            root.put_file(folder, FILE, [noise(12 << 20)])
        with pytest.raises(StorageError, match=r"cannot list s3://.*commits.*: no answer"):
            root.publish(folder, MARKER_SIGNED, b"{}")
        assert time.monotonic() - begun_s < 15.0
        assert own_server.process.returncode == -9
    finally:
        s3.close()


def test_upload_in_parts_that_fails_leaves_no_object_and_needs_no_right_to_delete(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 20)
    root = s3.root(retry_for_s=0.3)
    folder = root.make_folder(NAME)
    s3.policy = lambda method, key, number: "slow" if method == "PUT" and number > 2 else None
    with pytest.raises(StorageError, match=r"a part did not go through in 0\.3 s; the others stay hidden"):
        root.put_file(folder, FILE, [noise(12 << 20)])
    assert root.files(folder) == {}
    assert all(request.status == 403 for request in s3.of("DELETE"))


def test_kms_key_is_sent_with_every_write(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CONDITIONAL_BYTES", 1 << 20)
    key = "arn:aws:kms:us-east-1:111122223333:key/k1"
    root = s3.root(kms_key=key)
    folder = committed(root)
    root.put_file(folder, rank_file_name(5, 6), [noise(6 << 20)])
    starts = [request for request in s3.requests if request.method == "PUT" and "partNumber" not in request.query]
    starts += [request for request in s3.requests if request.method == "POST" and "uploads" in request.query]
    assert len(starts) == 6
    for request in starts:
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == key


def test_records_are_written_once_and_listed(s3: S3) -> None:
    root = s3.root()
    assert root.records("pins") == {} and root.record_names("pins") == frozenset()
    root.put_record("pins", "a.b", b'{"x": 1}')
    root.put_record("pins", "a.b", b'{"x": 1}')
    root.put_record("tiers", "other", b"{}")
    with pytest.raises(StorageError, match="a record is written once"):
        root.put_record("pins", "a.b", b'{"x": 2}')
    assert root.records("pins") == {"a.b": b'{"x": 1}'}
    record = QuarantineRecord(checkpoint=NAME.text, step=1200, reason="r", file=None, by_rank=0, time="t")
    write_quarantine(root, record)
    write_quarantine(root, QuarantineRecord(checkpoint=NAME.text, step=1, reason="q", file=None, by_rank=1, time="u"))
    assert quarantined(root) == {NAME.text} and b'"r"' in root.records("quarantine")[NAME.text]


def test_lost_and_damaged_objects_are_found(s3: S3) -> None:
    root, deleter = s3.root(), open_deleter(f"s3://{s3.bucket}/team/ckpt", s3.options())
    folder = committed(root)
    with pytest.raises(StorageError, match="is committed; its files are not deleted before its marker"):
        deleter.delete_file(folder, FILE)
    with pytest.raises(StorageError, match=r"403 .*AccessDenied.*needs the right to delete"):
        deleter.delete_marker(folder)
    s3.may_delete = True
    marker = root.marker(folder)
    assert marker is not None
    deleter.delete_marker(folder)
    assert root.marker(folder) is None and root.folders() == [folder]
    deleter.delete_file(folder, FILE)
    root.publish(folder, *marker)
    assert verify_errors(root, folder) == [f"{FILE}: is missing"]
    deleter.delete_marker(folder)
    root.put_file(folder, FILE, [noise(3000, 9)])
    root.publish(folder, *marker)
    (error,) = verify_errors(root, folder)
    assert error.startswith(f"{FILE}: SHA-256 is ")
    # And all of it goes, in the order that pruning takes; a second time it is no error.
    for _ in range(2):
        deleter.delete_marker(folder)
        for name in (*dict.fromkeys([FILE, rank_file_name(1, 2), INDEX_NAME]),):
            deleter.delete_file(folder, name)
        deleter.remove_folder(folder)
    assert s3.keys() == [] and root.files(folder) is None
    with pytest.raises(StorageError, match="it is not deleted"):
        deleter.delete_file(folder, "../x")


def test_files_of_a_save_that_rank_0_never_wrote_are_found(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    assert root.files(folder) == {}
    root.put_file(folder, rank_file_name(1, 2), [b"x"])
    assert root.files(folder) == {rank_file_name(1, 2): 1}
    assert root.files(FolderName(1, 1, 1, 0, "job7").text) is None
    assert root.record_names(CLAIMS) == {folder}


def test_bucket_that_does_not_exist_is_said(s3: S3) -> None:
    root = open_root("s3://no-such-bucket-here/x", s3.options())
    for action in (root.folders, lambda: root.make_folder(NAME), lambda: root.marker(NAME.text)):
        with pytest.raises(StorageError, match=r"cannot \w+ s3://no-such-bucket-here/x/"):
            action()


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:9000", "HTTP://store", "store:9000"])
def test_endpoint_without_tls_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with pytest.raises(ConfigError, match=r"endpoint '.*' has no TLS: .* allow http explicitly"):
        open_root("s3://bucket/x", StoreOptions(endpoint=endpoint))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL '.*' has no TLS"):
        open_root("s3://bucket/x")
    open_root("s3://bucket/x", StoreOptions(endpoint="https://store", region="r"))
    open_root("s3://bucket/x", StoreOptions(allow_http=True, region="r"))


def test_environment_cannot_allow_http(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(ConfigError, match="has no TLS"):
        open_root(f"s3://{s3.bucket}/x", s3.options(allow_http=False))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("gs://bucket/x", {"kms_key": "k"}, r"kms_key 'k' is for s3:// roots; gs://bucket/x"),
        ("az://bucket/x", {"endpoint": "https://e"}, r"endpoint 'https://e' is for s3:// roots"),
        ("s3://bucket/x", {"part_bytes": 1 << 20}, r"part_bytes=1048576, parallel=8: parts have at least 5242880"),
    ],
)
def test_options_that_do_not_fit_are_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_root(url, StoreOptions(**options))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "checkpoint root is empty; give a path, file:///path, s3://bucket/prefix, gs://"),
        ("ftp://host/x", "has scheme 'ftp'; give a path, "),
        ("https://store.example/b", "is the address of a server; give s3://bucket/prefix and that address as endpoint"),
        ("s3:/bucket/x", r"is a URL with one slash \(pathlib.Path does that\); give s3://bucket/x as a string"),
        (Path("s3://bucket/x"), "is a URL with one slash"),
        ("s3://", "the bucket name '' is not valid"),
        ("s3://bucket/a//b", "the prefix part '' is not valid"),
        ("s3://bucket/../b", r"the prefix part '\.\.' is not valid"),
        ("s3://key:secret@bucket/x", "s3://bucket/x: no user, password, query or fragment"),
        ("s3://bucket/x?region=y", "no user, password, query or fragment"),
        ("file://host/x", "names a host; a file URL is file:///absolute/path"),
    ],
)
def test_bad_root_is_refused(url: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_root(url)
    assert "secret" not in str(caught.value)


def test_roots_that_are_paths() -> None:
    assert parse_root("file:///a/b%20c") == Path("/a/b c") == parse_root(Path("/a/b c"))
    assert parse_root(Path("file:///a/b")) == Path("/a/b")
    assert parse_root("relative/x:y") == Path("relative/x:y")
    assert open_root("/a").where == "/a"


def test_missing_package_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"s3://bucket/x: object stores need .* pip install 'keepstep\[checkpoint\]'"):
        open_root("s3://bucket/x")


def test_many_threads_read_one_object(s3: S3) -> None:
    root = s3.root()
    folder = root.make_folder(NAME)
    data = noise(400_000)
    root.put_file(folder, FILE, [data])
    opened = root.open(folder, FILE)
    buffer = bytearray(len(data))
    threads = [
        threading.Thread(target=opened.read_into, args=(memoryview(buffer)[at : at + 50_000], at))
        for at in range(0, len(data), 50_000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffer == data
