"""Corpora: filters, duplicates, shuffling and sharding, with the same shards whoever does the work."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from boost_core.config.data_files import read_index
from boost_core.config.training import CorpusConfig, NearDedup, QualityFilter
from boost_core.data import __main__ as command
from boost_core.data.pipeline import filters
from boost_core.data.pipeline.build import Build, BuildProgress, Lineage
from boost_core.data.pipeline.duplicates import Ties, not_the_first, ties
from boost_core.data.pipeline.engine import LocalEngine

WORDS = [f"word{number}" for number in range(2000)]
FILES = 4


def texts(count: int = 120) -> list[str]:
    """Different texts; then copies of the first three with other white space and case, and some with a word more."""
    chance = random.Random(1)
    made = [" ".join(chance.choices(WORDS, k=chance.randint(60, 200))) for _ in range(count)]
    return made + [text.upper().replace(" ", "\n") for text in made[:3]] + [f"{text} more" for text in made[10:15]]


def write(folder: Path, found: list[str]) -> Path:
    folder.mkdir()
    for number in range(FILES):
        lines = [json.dumps({"text": text}) for text in found[number::FILES]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def corpus(folder: Path, **changes: Any) -> CorpusConfig:
    return CorpusConfig.model_validate(
        {"source": {"kind": "jsonl", "paths": [str(folder)]}, "shard_tokens": 20_000, "validation_fraction": 0.1}
        | changes
    )


def make(wanted: CorpusConfig, folder: Path, workers: int = 1, report: Callable[[BuildProgress], None] = id) -> Lineage:
    with closing(LocalEngine(workers)) as engine:
        return Build(wanted, str(folder), engine, report).run()


def documents(folder: Path) -> list[str]:
    """All documents of a folder of byte tokens, in the order of its shards."""
    index = read_index(str(folder))
    content = b"".join((folder / shard.name).read_bytes() for shard in index.shards)
    return content.decode().split("\0")[:-1]


def shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))}


def test_the_first_of_what_is_the_same_or_almost_the_same_stays(tmp_path: Path) -> None:
    found = texts()
    source = write(tmp_path / "in", found)
    lineage = make(corpus(source, exact_dedup=True, near_dedup={}), tmp_path / "out")
    counts = lineage.counts
    assert (counts.read, counts.exact_duplicates, counts.near_duplicates, counts.kept) == (128, 3, 5, 120)
    # The first by file and place, which is not always the first of the list that was dealt to the files.
    kept = documents(tmp_path / "out")
    assert len(kept) == 120
    assert {" ".join(text.lower().split()).removesuffix(" more") for text in kept} == set(found[:120])


def test_what_differs_is_kept(tmp_path: Path) -> None:
    found = texts()
    source = write(tmp_path / "in", found)
    assert make(corpus(source), tmp_path / "all").counts.kept == len(found)
    assert sorted(documents(tmp_path / "all")) == sorted(found)
    exact = make(corpus(source, exact_dedup=True), tmp_path / "exact").counts
    assert (exact.exact_duplicates, exact.near_duplicates, exact.kept) == (3, 0, 125)


def test_shards_are_shuffled_by_the_seed_and_told_by_their_lineage(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts())
    first, again, other = (
        make(corpus(source, seed=seed), tmp_path / name) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert shards(tmp_path / "a") == shards(tmp_path / "b") != shards(tmp_path / "c")
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert sorted(documents(tmp_path / "a")) == sorted(documents(tmp_path / "c"))
    written = Lineage.model_validate_json((tmp_path / "a" / "lineage.json").read_bytes())
    assert {shard.name: shard.sha256 for shard in written.shards} == shards(tmp_path / "a")
    assert [Path(file.file).name for file in written.files] == [f"{number}.jsonl" for number in range(FILES)]
    assert sum(shard.tokens for shard in written.shards) == written.counts.tokens
    assert not (tmp_path / "a" / "building").exists()


@pytest.mark.full
def test_processes_make_the_same_shards(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts())
    wanted = corpus(source, exact_dedup=True, near_dedup={})
    assert make(wanted, tmp_path / "one").fingerprint == make(wanted, tmp_path / "two", workers=2).fingerprint
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


@pytest.mark.full
@pytest.mark.parametrize("after", [1, 3, 6])
def test_an_interrupted_run_goes_on_to_the_same_shards(tmp_path: Path, after: int) -> None:
    source = write(tmp_path / "in", texts())
    wanted = corpus(source, exact_dedup=True)
    whole = make(wanted, tmp_path / "whole")
    reports = iter(range(after))

    def interrupt(_progress: BuildProgress) -> None:
        if next(reports, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(wanted, tmp_path / "cut", report=interrupt)
    seen: list[BuildProgress] = []
    assert make(wanted, tmp_path / "cut", report=seen.append).fingerprint == whole.fingerprint
    assert seen[0].done == min(after, FILES)  # what was done before
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")


@pytest.mark.parametrize("record", ["file-00000.json", "shards-00000.json"])
def test_a_record_that_a_lost_machine_left_empty_is_made_again(tmp_path: Path, record: str) -> None:
    wanted = corpus(write(tmp_path / "in", texts(40)))
    whole = make(wanted, tmp_path / "whole")

    def interrupt(progress: BuildProgress) -> None:
        if progress.stage == "shards" and progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(wanted, tmp_path / "cut", report=interrupt)
    (tmp_path / "cut" / "building" / record).write_bytes(b"")
    assert make(wanted, tmp_path / "cut").fingerprint == whole.fingerprint
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")


@pytest.mark.full
def test_a_killed_run_goes_on_to_the_same_shards(tmp_path: Path) -> None:
    wanted = corpus(write(tmp_path / "in", texts(40)), exact_dedup=True)
    script = (
        "import signal, sys\n"
        "from boost_core.config.training import CorpusConfig\n"
        "from boost_core.data.pipeline.build import Build\n"
        "from boost_core.data.pipeline.engine import LocalEngine\n"
        "def report(progress):\n"
        "    if progress.done == 2:\n"
        "        print('two files are done', flush=True)\n"
        "        signal.pause()\n"
        "Build(CorpusConfig.model_validate_json(sys.argv[1]), sys.argv[2], LocalEngine(1), report).run()\n"
    )
    command = [sys.executable, "-c", script, wanted.model_dump_json(), str(tmp_path / "cut")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        assert run.stdout.readline() == "two files are done\n"
        run.send_signal(signal.SIGKILL)
    seen: list[BuildProgress] = []
    make(wanted, tmp_path / "cut", report=seen.append)
    make(wanted, tmp_path / "whole")
    assert (seen[0].done, seen[0].counts.read, seen[0].bytes) == (2, 24, 0)
    assert 0 < seen[-1].bytes < seen[-1].counts.bytes  # what the killed run has read says nothing of this one's rate
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")


@pytest.mark.full
def test_workers_end_with_the_process_that_is_killed() -> None:
    script = (
        "import os, signal, time\n"
        "from boost_core.data.pipeline.engine import LocalEngine\n"
        "if __name__ == '__main__':\n"
        "    engine = LocalEngine(2)\n"
        "    print(*engine.map(os.getpgid, [0]), flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as run:
        assert run.stdout
        group = int(run.stdout.readline())
        assert psutil.Process(run.pid).children()
        run.kill()
        run.wait()
        assert run.stdout.read() == b""  # which a worker would hold open
    wait_until_gone(group)


def wait_until_gone(group: int) -> None:
    """Return as soon as a process group has no process any more."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("workers have outlived the process that began them")


def test_a_file_that_changed_meanwhile_is_read_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    wanted = corpus(source)

    def interrupt(progress: BuildProgress) -> None:
        if progress.stage == "shards":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(wanted, tmp_path / "out", report=interrupt)
    (source / "1.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    make(wanted, tmp_path / "out")
    make(wanted, tmp_path / "anew")
    assert "another" in documents(tmp_path / "out")
    assert shards(tmp_path / "out") == shards(tmp_path / "anew")
    (source / "1.jsonl").write_text(json.dumps({"text": "yet another"}) + "\n")
    with pytest.raises(ValueError, match=r"1\.jsonl was added, removed or changed since"):
        make(wanted, tmp_path / "out")


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    make(corpus(source), tmp_path / "out")
    with pytest.raises(ValueError, match="from another tokenizer, filters, split, seed"):
        make(corpus(source, seed=5), tmp_path / "out")


def test_bad_documents_are_named_or_listed(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    with (source / "2.jsonl").open("a") as stream:
        stream.write("broken\n")
    with pytest.raises(ValueError, match=r"2\.jsonl, line 13: no JSON from character"):
        make(corpus(source), tmp_path / "out")
    counts = make(corpus(source, on_error="skip"), tmp_path / "out").counts
    assert (counts.bad, counts.kept) == (1, 48)
    (listed,) = (tmp_path / "out").glob("quarantine-*.jsonl")
    assert json.loads(listed.read_text())["place"] == "line 13"


def test_a_file_of_which_a_stopped_run_skipped_documents_is_read_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    with (source / "2.jsonl").open("a") as stream:
        stream.write("broken\n")

    def interrupt(progress: BuildProgress) -> None:
        if progress.stage == "shards":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(corpus(source, on_error="skip"), tmp_path / "out", report=interrupt)
    with pytest.raises(ValueError, match=r"2\.jsonl, line 13: no JSON from character"):
        make(corpus(source), tmp_path / "out")


@pytest.mark.full
def test_a_full_disk_is_said_and_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", texts(40))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training-00000.bin").symlink_to("/dev/full")
    arguments = ["tokenize", str(source), str(tmp_path / "out"), "--kind", "jsonl", "--exact-dedup"]
    assert command.main(arguments) == 2
    shard = tmp_path / "out" / "training-00000.bin"
    assert f"{shard}: No space left on device; make room and run the same command" in capsys.readouterr().err
    assert not shard.is_symlink()
    assert command.main(arguments) == 0
    assert "lineage.json says" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "at"), [((), "training-00000.bin"), (("--exact-dedup", "--workers=1"), "building/*-00000-000.bin")]
)
def test_of_a_file_that_cannot_be_written_nothing_stays(tmp_path: Path, options: tuple[str, ...], at: str) -> None:
    """A limit on the size of files is met in the middle of one, as a full disk is."""
    source = write(tmp_path / "in", texts())

    def tokenize(most: int, folder: str) -> subprocess.CompletedProcess[str]:
        script = f"""if True:
            import resource, sys
            resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
            from boost_core.data.__main__ import main
            sys.exit(main(sys.argv[1:]))"""
        command = ["tokenize", str(source), str(tmp_path / folder), "--kind=jsonl", *options]
        return subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)

    refused = tokenize(20_000, "out")
    assert refused.returncode == 2
    (named,) = re.findall(r"(\S+) cannot be used: File too large", " ".join(refused.stderr.split()))
    assert Path(named).match(f"{tmp_path}/out/{at}")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".bin", ".new")]
    assert tokenize(2**30, "out").returncode == tokenize(2**30, "whole").returncode == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_nothing_left_says_by_which_filter(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    with pytest.raises(ValueError, match=r"none of the 48 documents of .* 48 by words; fix the documents, or set"):
        make(corpus(source, filters=[{"measure": "words", "min": 1000}]), tmp_path / "out")


def test_filters_are_counted_by_measure(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [*texts(40), "a a\na a\na a", "# # # ..."])
    wanted = [{"measure": "repeated_lines", "max": 0.5}, {"measure": "symbols", "max": 0.5}]
    counts = make(corpus(source, filters=wanted), tmp_path / "out").counts
    assert (counts.filtered, counts.kept) == ({"repeated_lines": 1, "symbols": 1}, 48)


@pytest.mark.parametrize(
    ("measure", "text", "value"),
    [
        ("characters", "añb", 3),
        ("words", " two  words ", 2),
        ("words", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", 4),
        ("words", "\u4f7f\u7528 Python3.12\u7f16\u7a0b", 5),
        ("words", "\u0e01\u0e35\u0e48\u0e04\u0e23\u0e31\u0e49\u0e07", 4),
        ("words", "\ud55c\uad6d\uc5b4 \ubb38\uc7a5", 2),
        ("word_length", "a bcd", 2),
        ("word_length", "", 0),
        ("symbols", "#a b... c… d", 0.75),
        ("letters", "12 a3 - ü", 0.5),
        ("letters", "12 a3\x1c- b!", 0.5),
        ("letters", "\u0e01\u0e35\u0e48\u0e04\u0e23\u0e31\u0e49\u0e07, \u4f60\u597d\u3002", 1),
        ("repeated_lines", "ab\n ab\n\ncdef", 0.25),
        ("repeated_lines", "\n", 0),
    ],
)
def test_measures(measure: Any, text: str, value: float) -> None:
    assert filters.MEASURES[measure](text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"measure": "words"}, "the filter has no bound"),
        ({"measure": "words", "min": 3, "max": 2}, r"min \(3\) must not exceed max \(2\)"),
        ({"measure": "words", "min": float("nan")}, "finite"),
        ({"measure": "wit", "min": 1}, "characters"),
    ],
)
def test_filters_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QualityFilter.model_validate(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--filter", "words:1"], "is not MEASURE:MIN:MAX"),
        (["--filter", "words:3:2"], "'words:3:2': min (3) must not exceed max (2)"),
        (["--filter", "words::"], "the filter has no bound"),
        (["--address", "auto"], "give --ray, too"),
        (["--ray", "--workers", "2"], "leave one out"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main(["tokenize", str(tmp_path), str(tmp_path / "out"), *options])
    except SystemExit as refused:
        status = refused.code
    assert (status, message in capsys.readouterr().err) == (2, True)


def test_ties_are_to_the_first_and_hang_together() -> None:
    found = ties(np.array([7, 9, 7, 9, 7], np.uint64), np.array([5, 1, 3, 2, 4]))
    assert sorted(zip(*(each.tolist() for each in found), strict=True)) == [(2, 1), (4, 3), (5, 3)]
    chain = Ties(np.array([2, 3, 9, 8]), np.array([1, 2, 4, 3]))
    assert not_the_first([chain]).tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize(("overlap", "tied"), [(0.2, False), (0.95, True)])
def test_near_duplicates_share_a_band_as_their_overlap_says(overlap: float, tied: bool) -> None:
    """At 0.2 a pair of 14 bands of 8 rows is tied with a probability of 4e-5, at 0.95 it is not with 2e-7."""
    from boost_core.data.pipeline.duplicates import minhash_keys

    chance, near = random.Random(3), NearDedup(shingle_words=1)
    for _ in range(20):
        common = [str(chance.random()) for _ in range(round(200 * overlap))]
        pair = [common + [str(chance.random()) for _ in range((200 - len(common)) // 2)] for _ in range(2)]
        first, second = minhash_keys(pair, near)
        assert bool((first == second).any()) is tied


def test_shingles_do_not_reach_into_the_next_document() -> None:
    from boost_core.data.pipeline.duplicates import minhash_keys

    near = NearDedup()
    several = minhash_keys([["a", "b", "c"], [], ["d"] * 9, ["a", "b", "c"]], near)
    alone = minhash_keys([["a", "b", "c"]], near)
    assert (several[0] == alone[0]).all()
    assert (several[3] == alone[0]).all()
    assert not (several[2] == alone[0]).any()


def test_near_duplicates_of_text_without_spaces_are_removed(tmp_path: Path) -> None:
    chance = random.Random(0)
    found = ["".join(chr(chance.randrange(0x4E00, 0x9000)) for _ in range(2000)) for _ in range(20)]
    source = write(tmp_path / "in", [*found, f"{found[0][:1000]}\u6539{found[0][1001:]}"])
    wanted = corpus(source, near_dedup={}, filters=[{"measure": "words", "min": 2000}])
    counts = make(wanted, tmp_path / "out").counts
    assert (counts.filtered, counts.near_duplicates, counts.kept) == ({}, 1, 20)


def test_the_kept_record_of_a_file_is_of_the_same_corpus(tmp_path: Path) -> None:
    """A run with other filters does not go on with files that were filtered otherwise."""
    source = write(tmp_path / "in", texts(40))

    def interrupt(progress: BuildProgress) -> None:
        if progress.stage == "shards":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(corpus(source), tmp_path / "out", report=interrupt)
    counts = make(corpus(source, filters=[{"measure": "words", "min": 100}]), tmp_path / "out").counts
    assert counts.filtered["words"] > 0
