"""What a job may name, where the operator allows only some places."""

from pathlib import Path

import fsspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from boost_core.config import JobSpec, SourceConfig
from boost_core.config.data_files import list_files
from service.security.access import named_places, refused_places
from service.settings import Settings
from tests.unit.test_job_spec import changed

TENANT = "blue"
ON_S3 = ("s3://lake/{tenant}", "s3://shared")


def reading(path: str, **sections) -> JobSpec:
    return JobSpec.model_validate(changed(data={"source": {"kind": "text", "paths": [path]}}, **sections))


def is_allowed(path: str, *prefixes: str) -> bool:
    return not refused_places(named_places(reading(path)), prefixes, TENANT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tenant's folder ``blue``, beside another's ``blue-2``, with links out of it and in it."""
    root = tmp_path_factory.mktemp("lake")
    for name in ("blue/deep", "blue/b", "blue-2", "elsewhere"):
        (root / name).mkdir(parents=True)
    (root / "elsewhere" / "secret.txt").write_text("not yours")
    for name in ("blue/a", "blue/b/a", "blue/deep/a"):
        (root / name).write_text("yours")
    (root / "blue" / "out").symlink_to(root / "elsewhere")
    (root / "blue" / "file").symlink_to(root / "elsewhere" / "secret.txt")
    (root / "blue" / "*").symlink_to(root / "elsewhere")
    (root / "blue" / "in").symlink_to(root / "blue" / "deep")
    (root / "link").symlink_to(root / "blue")
    return root


LOCAL = [
    ("blue", True), ("blue/", True), ("blue//a", True), ("blue/./a", True), ("blue/a/../b", True), ("link/a", True),
    ("blue/in/a", True), ("blue/a.txt", True), ("blue/**/*.txt", True), ("blue/a?/[ab]*", True), ("blue/b/*", True),
    ("blue-2", False), ("blu", False), ("", False), ("blue/..", False), ("blue/../blue-2/a", False), ("blue*", False),
    ("blue?2/a", False), ("*/a", False), ("blue/out", False), ("blue/out/secret.txt", False), ("blue/out/*", False),
    ("blue/file", False), ("blue/*", False), ("blue/b/*/../../../elsewhere", False), ("blue/[a]/../../blue-2/*", False),
    ("*/../blue/a", False), ("blue-?/../blue/a", False),
]  # fmt: skip


@pytest.mark.parametrize("form", ["{}", "file://{}", "//{}"])
@pytest.mark.parametrize(("path", "allowed"), LOCAL)
def test_local_paths(folder: Path, path: str, allowed: bool, form: str) -> None:
    named = form.format(f"{folder}/{path}")
    for prefix in (f"{folder}/{{tenant}}", f"file://{folder}/{{tenant}}/", f"{folder}/link"):
        assert is_allowed(named, "s3://lake", prefix) is allowed, (named, prefix)
    assert is_allowed(named, "/") and not is_allowed(named, "s3://lake")


@pytest.mark.parametrize("path", ["corpus", "./corpus", "~/corpus", "file://corpus", "file:///../corpus/../..", "."])
def test_a_path_that_depends_on_the_process_is_in_no_folder(path: str) -> None:
    assert not is_allowed(path, str(Path.cwd()), str(Path.home()), "/no/such")


def test_a_wildcard_in_a_prefix_is_a_name_and_matches_nothing_else(folder: Path) -> None:
    assert is_allowed("s3://lake/b-e/a", "s3://lake/b-e") and not is_allowed("s3://lake/b*e/a", "s3://lake/b*e")
    assert not is_allowed(f"{folder}/b?ue/a", f"{folder}/b?ue")


S3 = [
    ("s3://lake/blue", True), ("s3://lake/blue/", True), ("s3://lake/blue/a/*.txt", True), ("s3://shared", True),
    ("s3://shared/*", True), ("s3://lake/blue//a", True), ("s3://lake/blue/part-?", True), ("s3:///lake/blue/a", True),
    ("s3://lake/blue-2/a", False), ("s3://lake/blue*", False), ("s3://lake", False), ("s3://lake/", False),
    ("s3://lake/*", False), ("s3://lake//blue/a", False), ("s3://lake/blue/../red", False), ("s3://share", False),
    ("s3://lake/./blue", False), ("s3://shared-2/a", False), ("s3://*/a", False), ("s3://", False),
    ("/lake/blue", False), ("file:///lake/blue", False),
]  # fmt: skip


@pytest.mark.parametrize(("url", "allowed"), S3)
def test_urls_on_s3(url: str, allowed: bool) -> None:
    assert is_allowed(url, *ON_S3) is allowed
    assert is_allowed(url, "s3://") is (url.startswith("s3://") and "/." not in url)


def test_every_place_of_a_spec_is_looked_at_and_named() -> None:
    bad = "/elsewhere"
    sources = [{"kind": "text", "paths": [path], "weight": 1} for path in ("s3://shared/a", bad)]
    sources[0]["paths"].append(bad)
    places = {"checkpoint": {"url": bad, "continue_from": f"file://{bad}"}}
    spec = JobSpec.model_validate(changed(data={"mixture": sources, "tokenizer": f"{bad}/tokenizer.json"}, **places))
    errors = refused_places(named_places(spec), ON_S3, TENANT)
    assert [(error.field, error.value) for error in errors] == [
        ("data.mixture[0].paths[1]", bad),
        ("data.mixture[1].paths[0]", bad),
        ("data.tokenizer", f"{bad}/tokenizer.json"),
        ("checkpoint.url", bad),
        ("checkpoint.continue_from", f"file://{bad}"),
    ]
    outside = "is outside of what this tenant may use; use a place under s3://lake/blue or s3://shared"
    assert {error.message for error in errors} == {outside}
    (lone,) = refused_places(named_places(reading(bad, checkpoint={"url": "s3://lake/blue/runs"})), ON_S3, TENANT)
    assert lone.field == "data.source.paths[0]"
    assert refused_places(named_places(spec), None, TENANT) == []


@pytest.mark.parametrize("data", [{}, {"source": {"kind": "standard_library"}, "tokenizer": "bytes"}], ids=str)
def test_what_names_no_place_needs_no_prefix(data: dict) -> None:
    assert refused_places(named_places(JobSpec.model_validate(changed(data=data))), (), TENANT) == []


NAMES = ["blue", "blue-2", "elsewhere", "out", "in", "file", "deep", "link", "a", "b", "*", "**", "?", "[a]", "..", "."]
STEPS = st.lists(st.one_of(st.sampled_from([*NAMES, ""]), st.text("ab*?[].", max_size=3)), max_size=6)
PATHS = st.one_of(STEPS, STEPS.map(lambda steps: ["blue", *steps])).map("/".join)


@settings(deadline=None)
@given(PATHS)
@example("blue/*")
@example("blue/b/*")
def test_no_file_is_read_from_elsewhere(folder: Path, path: str) -> None:
    """Whatever is let in, links and all, all files that the trainer then finds are the tenant's."""
    spec = reading(f"{folder}/{path}")
    if refused_places(named_places(spec), [f"{folder}/{{tenant}}"], TENANT):
        return
    source = spec.data.sources[0][0]
    try:
        list_files(source, {"beneath": [f"{folder}/blue"]})
        found = list_files(source)
    except ValueError:  # there are none, for one of both, or a link leads out
        return
    assert all(Path(file.url).resolve().is_relative_to(folder / "blue") for file in found), found


@settings(deadline=None)
@given(PATHS)
def test_no_path_that_resolves_outside_is_let_in(folder: Path, path: str) -> None:
    inside = Path(f"{folder}/{path}").resolve().is_relative_to(folder / "blue")
    assert inside or not is_allowed(f"{folder}/{path}", f"{folder}/{{tenant}}")


PLAIN = st.text("abc.-_ é", min_size=1).filter(lambda name: name not in (".", ".."))


@pytest.mark.full
@settings(deadline=None)
@given(st.lists(PLAIN))
def test_every_path_under_a_prefix_is_let_in(folder: Path, names: list[str]) -> None:
    for root, prefix in ((f"{folder}/blue/new", f"{folder}/{{tenant}}"), ("s3://lake/blue", ON_S3[0])):
        assert is_allowed("/".join([root, *names]), prefix)


TAILS = st.text("ab/.*@:-?= ")


@settings(deadline=None)
@given(st.one_of(TAILS, TAILS.map("lake/blue{}".format), TAILS.map("s3://lake/blue{}".format)))
@example("lake/blue/a")
@example("s3://lake/blue/a")
@example("/lake/blue/a")
def test_s3fs_sees_the_same_bucket_and_key(rest: str) -> None:
    """What is let in is under the prefix by s3fs's own reading of URLs, too."""
    try:
        spec = reading(f"s3://{rest}")
    except ValidationError:
        return
    if refused_places(named_places(spec), ON_S3, TENANT):
        return
    bucket, key, _ = fsspec.filesystem("s3", anon=True).split_path(f"s3://{rest}")
    assert f"{bucket}/{key}/".startswith("lake/blue/")


def test_the_settings_say_what_is_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def prefixes(value: str | None, auth: bool) -> tuple[str, ...] | None:
        if value is not None:
            monkeypatch.setenv("BOOST_ALLOWED_PREFIXES", value)
        return Settings(home=tmp_path, checkpoint_root="s3://runs/", auth=auth).prefixes()

    own = "s3://runs/{tenant}"
    assert prefixes(None, False) is None
    assert prefixes(None, True) == (own,)
    assert prefixes("", False) is None
    assert prefixes(" /data , s3://lake/{tenant},", False) == ("/data", "s3://lake/{tenant}", own)
    assert prefixes('["/da,ta"]', True) == ("/da,ta", own)
    for bad, message in (
        ("data", "is an absolute path"),
        ("gs://a", "has the scheme 'gs'"),
        ("/a/{user}", "and no other braces"),
        ("[1", "Expecting"),
        ("file://a", "is an absolute path"),
    ):
        with pytest.raises(ValidationError, match=message):
            prefixes(bad, True)


def test_links_in_a_folder_do_not_lead_out_of_it(folder: Path) -> None:
    """They are refused where the service looks a source up, before anything behind them is listed."""
    options = {"beneath": [f"{folder}/blue"]}
    for path in (f"{folder}/blue", f"{folder}/blue/**/*.txt", f"{folder}/blue/o*/*"):
        source = SourceConfig(kind="text", paths=(path,))
        with pytest.raises(ValueError, match="is a symbolic link to a place that this tenant may not use"):
            list_files(source, options)
    inside = SourceConfig(kind="text", paths=(f"{folder}/blue/in", f"{folder}/blue/b/*"))
    assert len(list_files(inside, options)) == 2
