from rollfeed.engine.server.service import WeightVersions


def test_default_is_0_and_digits_are_their_integer() -> None:
    versions = WeightVersions()
    assert (versions.number("default"), versions.number("12"), versions.number("0")) == (0, 12, 0)
    assert versions.name(12) == "12"
    assert versions.name(0) == "0"
    assert versions.name(5) == "5"


def test_other_names_get_integers_that_no_digits_have() -> None:
    versions = WeightVersions()
    first, second = versions.number("v7"), versions.number("step-8")
    assert first != second
    assert min(first, second) > 10**12
    assert versions.number("v7") == first
    assert versions.name(first) == "v7"
    assert versions.number("9" * 400) != versions.number("8" * 400)


def test_the_name_given_last_is_the_one_told() -> None:
    versions = WeightVersions()
    assert versions.number("7") == versions.number("007")
    assert versions.name(7) == "007"
    versions.number("7")
    assert versions.name(7) == "7"
