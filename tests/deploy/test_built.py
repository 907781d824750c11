from deploy.build import differing


def test_what_is_built_is_as_it_would_be_built_now() -> None:
    assert differing() == [], "not as their source says; run: python -m deploy.build"
