from esper.tamiyo import policy


def test_the_public_names_are_there() -> None:
    assert sorted(policy.__all__) == sorted(set(policy.__all__))
    for name in policy.__all__:
        assert hasattr(policy, name)
