"""Texts that are computed: lines of sums, lines of links, and a Markov chain.

They need no file, and are the same on every platform: all numbers in them are hashes of their index
(`esper.utils.randomness.random_words`), and no real number decides anything.
"""

from __future__ import annotations

import numpy as np
import torch

from esper.lab.tasks.data.source import Array, Source
from esper.lab.tasks.data.text import VOCAB, cut
from esper.utils.randomness import derive_seed, random_words

_SEED = 20_260_301


def read_sums(context: int) -> Source:
    """Return `make_sums` as sequences of bytes."""
    return _source("sums", make_sums(), context)


def read_links(context: int) -> Source:
    """Return `make_links` as sequences of bytes."""
    return _source("links", make_links(), context)


def read_chain(context: int) -> Source:
    """Return `make_chain` as sequences of bytes."""
    return _source("chain", make_chain(), context)


def _source(name: str, text: Array, context: int) -> Source:
    return Source(name, f"the embedded text {name}", cut(text, context), None, num_classes=VOCAB)


def _numbers(count: int, below: int, *keys: int | str) -> Array:
    """Return int64 [count]: random numbers from 0 to below - 1 for the purpose of these keys."""
    return (_words(count, *keys) * below) >> 32


def _words(count: int, *keys: int | str) -> Array:
    """Return int64 [count]: 32 random bits each."""
    words: Array = random_words(torch.tensor([derive_seed(_SEED, *keys)]), count)[0].numpy()
    return words


# ---- Sums and products: the digits of the result follow from those of both numbers


def make_sums(count: int = 400_000) -> Array:
    """Return `count` lines `a+b=c` or `a*d=e`; a and b have up to three digits, d has one."""
    a = _numbers(count, 1000, "sums", "a")
    is_product = _numbers(count, 2, "sums", "kind") == 1
    b = np.where(
        is_product, 2 + _numbers(count, 8, "sums", "d"), _numbers(count, 1000, "sums", "b")
    )
    lines = [
        _digits(a, 3),
        _column(np.where(is_product, ord("*"), ord("+"))),
        _digits(b, 3),
        _column(np.full(count, ord("="))),
        _digits(np.where(is_product, a * b, a + b), 4),
        _column(np.full(count, ord("\n"))),
    ]
    text = np.concatenate(lines, axis=1).reshape(-1)
    return text[text > 0]


def _digits(numbers: Array, width: int) -> Array:
    """Return bytes [N, width]: decimal digits, right-aligned, with 0 in place of leading zeros."""
    powers = 10 ** np.arange(width)[::-1]
    digits = ord("0") + numbers[:, None] // powers % 10
    # The last digit of 0 is no leading zero.
    is_leading = (numbers[:, None] < powers) & (powers > 1)
    return np.where(is_leading, 0, digits).astype(np.uint8)


def _column(values: Array) -> Array:
    return values.astype(np.uint8)[:, None]


# ---- Links: a value is found by following names, one step per link


VARIABLES = 4


def make_links(count: int = 150_000) -> Array:
    """Return `count` lines such as `q=3,b=q,x=b,e=7:x3,e7,q3,b3`.

    Four variables are a digit or another's name each, and then the values of all are asked for, in
    any order. 7 of 10 variables after the first name an earlier one.
    """
    names = ord("a") + _distinct(VARIABLES, 26, count, "links", "names")
    order = _distinct(VARIABLES, VARIABLES, count, "links", "order")
    lines, values = np.arange(count), np.empty_like(names)
    text = np.empty((count, 7 * VARIABLES), np.uint8)
    for i in range(VARIABLES):
        values[:, i] = said = ord("0") + _numbers(count, 10, "links", "value", i)
        if i:
            earlier = _numbers(count, i, "links", "earlier", i)
            is_link = _numbers(count, 10, "links", "kind", i) < 7
            said = np.where(is_link, names[lines, earlier], said)
            values[:, i] = np.where(is_link, values[lines, earlier], values[:, i])
        text[:, 4 * i] = names[:, i]
        text[:, 4 * i + 1] = ord("=")
        text[:, 4 * i + 2] = said
        text[:, 4 * i + 3] = ord(",")
    text[:, 4 * VARIABLES - 1] = ord(":")
    answers = text[:, 4 * VARIABLES :]
    answers[:, 0::3] = np.take_along_axis(names, order, axis=1)
    answers[:, 1::3] = np.take_along_axis(values, order, axis=1)
    answers[:, 2::3] = ord(",")
    answers[:, -1] = ord("\n")
    return text.reshape(-1)


def _distinct(picks: int, below: int, count: int, *keys: int | str) -> Array:
    """Return int64 [count, picks]: different random numbers from 0 to below - 1 in every row."""
    chosen = np.empty((count, 0), np.int64)
    for pick in range(picks):
        # A number among those that are left; it moves up by one for each one below it.
        number = _numbers(count, below - pick, *keys, pick)
        for taken in np.sort(chosen, axis=1).T:
            number += number >= taken
        chosen = np.column_stack([chosen, number])
    return chosen


# ---- A chain of order two: two bytes say all that can be known about the next one


SYMBOLS = b" etaoinshrdlucmfwypvbgkjqxz.,\n"
"""The symbols of the chain; those in front are the more frequent ones."""
_BRANCHES = 48, 12
"""Draws of next symbols after one symbol, and after two."""
_CHAINS = 4096


def make_chain(steps: int = 1024) -> Array:
    """Return 4,096 walks of so many symbols through `make_table`, one after another."""
    size, count = len(SYMBOLS), steps * _CHAINS
    table = make_table().reshape(-1).astype(np.int32)
    # A word has four choices among 256 cases.
    words = _words(count // 4, "chain", "walk")
    choices = np.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)]).astype(np.int32)
    walks = np.empty((steps, _CHAINS), np.uint8)
    before, last = np.divmod(_numbers(_CHAINS, size * size, "chain", "start"), size)
    pairs = (before * size + last).astype(np.int32)
    for step, choice in enumerate(choices.reshape(steps, _CHAINS)):
        last = table[pairs * 256 + choice]
        pairs = pairs % size * size + last
        walks[step] = last
    return np.frombuffer(SYMBOLS, np.uint8)[walks.T.reshape(-1)]


def make_table() -> Array:
    """Return int64 [S, S, 256]: what follows two symbols, each entry in one of 256 cases.

    As in text, what follows two symbols is drawn from what follows the second of them, and that
    from what is frequent. So the next symbol is about as hard to guess as in text: 4.4 bits without
    any before it, 3.5 after one, 2.5 after two (Python's manual in these symbols: 4.2, 3.4, 2.5).
    """
    size, (after_one, after_two) = len(SYMBOLS), _BRANCHES
    usual = _uneven(np.arange(size))
    draws = _numbers(size * after_one, 256, "chain", "one")
    one = _uneven(usual[draws.reshape(size, after_one)])
    draws = _numbers(size * size * after_two, 256, "chain", "two")
    return _uneven(one[np.arange(size)[:, None], draws.reshape(size, size, after_two)])


def _uneven(symbols: Array) -> Array:
    """Return [..., 256]: the symbols [..., N], the first ones more often than the last ones."""
    ranks = np.arange(256) ** 2 * symbols.shape[-1] >> 16
    return symbols[..., ranks]
