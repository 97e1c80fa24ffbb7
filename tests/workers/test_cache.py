from rollfeed.workers.pool import ResultCache


def test_the_longest_unused_result_makes_room() -> None:
    cache = ResultCache(max_entries=2, max_bytes=1_000)
    keys = [cache.key("f", str(number)) for number in range(3)]
    cache.put(keys[0], "0")
    cache.put(keys[1], "1")
    assert cache.get(keys[0]) == "0"
    cache.put(keys[2], "2")
    assert [cache.get(key) for key in keys] == ["0", None, "2"]


def test_results_are_bounded_in_bytes() -> None:
    cache = ResultCache(max_entries=100, max_bytes=10)
    for number in range(20):
        cache.put(cache.key("f", str(number)), "xxxx")
    assert len(cache) == 2
    cache.put(cache.key("f", "big"), "x" * 11)
    assert len(cache) == 0


def test_another_function_or_argument_is_another_question() -> None:
    assert len({ResultCache.key("f", "[1]"), ResultCache.key("g", "[1]"), ResultCache.key("f", "[2]")}) == 3
