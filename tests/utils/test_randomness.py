import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.utils.randomness import (
    derive_seed,
    generator,
    random_orders,
    random_states,
    random_words,
    restore_random_states,
    seeded,
    words_at,
)

KEYS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), max_size=4)


@pytest.mark.parametrize(
    ("keys", "seed"),
    [
        ((), 3797230976420062948),
        ((0,), 3023535271730666398),
        ((42,), 7485565241581719734),
        ((-1,), 7309420692184324189),
        (("data",), 6113630203917871063),
        ((7, "data", 0), 4845004588036600103),
        ((42, 3, 150, "shuffle"), 8379215685303696098),
        ((2**80, "ü"), 7173831388112987035),
    ],
)
def test_golden_seeds_keep_saved_runs_reproducible(keys: tuple[int | str, ...], seed: int) -> None:
    assert derive_seed(*keys) == seed


def test_golden_draws() -> None:
    stream = generator(7, "data", 0)
    assert torch.randint(0, 1000, (4,), generator=stream).tolist() == [193, 703, 249, 823]


@given(KEYS)
def test_a_seed_fits_every_generator(keys: list[int | str]) -> None:
    seed = derive_seed(*keys)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(*keys)


@given(KEYS, KEYS)
def test_other_keys_give_another_seed(first: list[int | str], second: list[int | str]) -> None:
    same = [(type(key), key) for key in first] == [(type(key), key) for key in second]
    assert (derive_seed(*first) == derive_seed(*second)) == same


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 2), (2, 1)),
        ((1,), (1, 0)),
        ((), (0,)),
        (("ab", "c"), ("a", "bc")),
        (("1",), (1,)),
        # Numbers beyond one machine word must not run into their neighbours.
        ((1 + 2 * 2**32, 3), (1, 2 + 3 * 2**32)),
        ((-1,), (2**64 - 1,)),
    ],
)
def test_keys_that_look_alike_stay_apart(
    first: tuple[int | str, ...], second: tuple[int | str, ...]
) -> None:
    assert derive_seed(*first) != derive_seed(*second)


def test_whole_numbers_of_any_library_are_the_same_key() -> None:
    assert derive_seed(np.int64(5), "x") == derive_seed(5, "x")  # type: ignore[arg-type]


def test_a_fraction_is_no_key() -> None:
    with pytest.raises(TypeError):
        derive_seed(0.5)  # type: ignore[arg-type]


def test_generators_of_one_stream_draw_the_same() -> None:
    first, second = generator(1, "x"), generator(1, "x")
    assert torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=second))
    other = torch.rand(5, generator=generator(2, "x"))
    assert not torch.equal(torch.rand(5, generator=generator(1, "x")), other)


def test_seeded_draws_from_the_stream_whatever_came_before() -> None:
    with seeded(3, "init"):
        first = torch.rand(5)
    torch.rand(17)
    with seeded(3, "init"):
        second = torch.rand(5)
    assert torch.equal(first, second)


def test_seeded_leaves_every_global_generator_untouched() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    with seeded("anything"):
        torch.rand(100)
        assert not torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_seeded_puts_the_state_back_after_an_error() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with seeded(1):
            torch.rand(3)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_nests() -> None:
    with seeded(1):
        first = torch.rand(2)
        with seeded(2):
            torch.rand(9)
        rest = torch.rand(2)
    with seeded(1):
        assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.rand(2), rest)


def test_words_depend_on_seed_and_index_alone() -> None:
    seeds = torch.tensor([derive_seed(7, row) for row in range(5)])
    together = random_words(seeds, 1000)
    assert together.shape == (5, 1000)
    for row, seed in enumerate(seeds):
        assert torch.equal(random_words(seed[None], 600)[0], together[row, :600])


def test_words_at_any_places_are_those_words() -> None:
    seed = derive_seed("places")
    words = random_words(torch.tensor([seed]), 1000)[0]
    places = torch.tensor([[3, 999], [0, 3]])
    assert torch.equal(words_at(seed, places), words[places])
    far = 1 << 31
    assert int(words_at(seed, torch.tensor(far))) == int(random_words(torch.tensor([seed]), 1, far))


def test_words_are_spread_evenly_and_every_bit_of_a_seed_counts() -> None:
    words = random_words(torch.tensor([derive_seed("even")]), 1 << 16)[0]
    assert int(words.min()) >= 0
    assert int(words.max()) < 1 << 32
    counts = torch.bincount(words >> 24, minlength=256).double()
    # A chi-square of 255 degrees of freedom: mean 255, deviation 22.6.
    assert float(((counts - 256) ** 2 / 256).sum()) < 255 + 5 * 22.6
    base = derive_seed("bits")
    flipped = torch.tensor([base, *(base ^ (1 << bit) for bit in range(63))])
    rows = random_words(flipped, 4096)
    for other in rows[1:]:
        changed = (rows[0] ^ other).unsqueeze(-1).bitwise_and(1 << torch.arange(32)) != 0
        assert 0.47 < float(changed.double().mean()) < 0.53


def test_orders_are_permutations_that_differ() -> None:
    seeds = torch.tensor([derive_seed("order", row) for row in range(64)])
    orders = random_orders(seeds, 101)
    everything = torch.arange(101).expand(64, 101)
    assert torch.equal(orders.sort(1).values, everything)
    # Where an index lands is even: the mean place over seeds is near the middle for all.
    places = orders.argsort(1).double().mean(0)
    assert float((places - 50).abs().max()) < 6 * 29.2 / 8
    assert not torch.equal(orders[0], orders[1])
    assert random_orders(seeds[:1], 1).tolist() == [[0]]


@pytest.mark.gpu
def test_a_device_draws_the_same_words() -> None:
    seeds = torch.tensor([derive_seed("device", row) for row in range(9)])
    assert torch.equal(random_orders(seeds.cuda(), 5000).cpu(), random_orders(seeds, 5000))


def test_generators_go_on_where_their_states_were_taken() -> None:
    own = torch.Generator().manual_seed(3)

    def draw() -> list[float]:
        drawn = [torch.rand(()), torch.rand((), generator=own)]
        # The second number of a pair is kept until it is asked for.
        return [random.gauss(0, 1), float(np.random.randn()), *map(float, drawn)]

    draw()
    states = random_states([own])
    expected = [draw(), draw()]
    restore_random_states(states, [own])
    assert [draw(), draw()] == expected
