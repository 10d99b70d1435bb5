"""Texts that are computed: sums, links, facts, mirrored, copied and sorted words, repeats, a chain.

They need no file, and are the same on every platform: all numbers in them are hashes of their index
(`esper.utils.randomness.random_words`), and no real number decides anything. All but the chain have
a level, which says how hard they are.
"""

from __future__ import annotations

import numpy as np
import torch

from esper.lab.tasks.data.source import Array, Source
from esper.lab.tasks.data.text import VOCAB, cut
from esper.utils.randomness import derive_seed, random_words

_SEED = 20_260_301
_BYTES = 4_000_000
"""About the length of a text."""


def read_computed(name: str, text: Array, context: int) -> Source:
    """Return a computed text as sequences of bytes."""
    return Source(name, f"the computed text {name}", cut(text, context), None, num_classes=VOCAB)


def _numbers(count: int, below: int, *keys: int | str) -> Array:
    """Return int64 [count]: random numbers from 0 to below - 1 for the purpose of these keys."""
    return (_words(count, *keys) * below) >> 32


def _words(count: int, *keys: int | str) -> Array:
    """Return int64 [count]: 32 random bits each."""
    words: Array = random_words(torch.tensor([derive_seed(_SEED, *keys)]), count)[0].numpy()
    return words


# ---- Sums and products: the digits of the result follow from those of both numbers


def make_sums(level: int = 3, count: int = 400_000) -> Array:
    """Return `count` lines `a+b=c` or `a*d=e`; a and b have up to `level` digits, d has one."""
    below = 10**level
    a = _numbers(count, below, "sums", "a")
    is_product = _numbers(count, 2, "sums", "kind") == 1
    b = np.where(
        is_product, 2 + _numbers(count, 8, "sums", "d"), _numbers(count, below, "sums", "b")
    )
    lines = [
        _digits(a, level),
        _column(np.where(is_product, ord("*"), ord("+"))),
        _digits(b, level),
        _column(np.full(count, ord("="))),
        _digits(np.where(is_product, a * b, a + b), level + 1),
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


def make_links(level: int = 4, count: int = 0) -> Array:
    """Return lines such as `q=3,b=q,x=b,e=7:x3,e7,q3,b3`; so many, or about 4 million bytes.

    As many variables as the level says are a digit or another's name each, and then the values of
    all are asked for, in any order. 7 of 10 variables after the first name an earlier one.
    """
    count = count or 600_000 // level
    names = ord("a") + _distinct(level, 26, count, "links", "names")
    order = _distinct(level, level, count, "links", "order")
    lines, values = np.arange(count), np.empty_like(names)
    text = np.empty((count, 7 * level), np.uint8)
    for i in range(level):
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
    text[:, 4 * level - 1] = ord(":")
    answers = text[:, 4 * level :]
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


# ---- Facts: a value can only be known by heart


_LETTERS = 4
"""Letters of a key and of a value."""


def make_facts(level: int = 400, count: int = 0) -> Array:
    """Return lines such as `lyzw:kipj`: one of `level` keys, each with a value of its own."""
    count = count or _BYTES // (2 * _LETTERS + 2)
    # Twice as many are drawn, because keys must differ.
    drawn = _numbers(2 * level, 26**_LETTERS, "facts", "keys")
    keys = drawn[np.sort(np.unique(drawn, return_index=True)[1])][:level]
    values = _numbers(level, 26**_LETTERS, "facts", "values")
    chosen = _numbers(count, level, "facts", "lines")
    text = np.empty((count, 2 * _LETTERS + 2), np.uint8)
    text[:, :_LETTERS] = _spell(keys)[chosen]
    text[:, _LETTERS] = ord(":")
    text[:, _LETTERS + 1 : -1] = _spell(values)[chosen]
    text[:, -1] = ord("\n")
    return text.reshape(-1)


def _spell(numbers: Array) -> Array:
    """Return bytes [N, letters]: the numbers in base 26."""
    powers = 26 ** np.arange(_LETTERS)
    return (ord("a") + numbers[:, None] // powers % 26).astype(np.uint8)


# ---- Mirrored and sorted words: a letter follows from a distant one, or from all letters


def make_mirrors(level: int = 6, count: int = 0) -> Array:
    """Return lines such as `lurtiv:vitrul`: a word of `level` random letters, and its mirror."""
    words = _random_words(level, count, "mirrors")
    return _paired(words, words[:, ::-1])


def make_copies(level: int = 5, count: int = 0) -> Array:
    """Return lines such as `abedac:abedac`: a word of `level` random letters out of six, twice.

    Each letter of the second one stands `level + 1` bytes behind itself, so a network that sees
    fewer bytes back can only guess it.
    """
    count = count or _BYTES // (2 * level + 2)
    words = ord("a") + _numbers(count * level, 6, "copies", "letters").reshape(count, level)
    return _paired(words, words)


def make_sorting(level: int = 5, count: int = 0) -> Array:
    """Return lines such as `gawng:aggnw`: `level` random letters, and the same in order."""
    words = _random_words(level, count, "sorting")
    return _paired(words, np.sort(words, axis=1))


def _random_words(letters: int, count: int, key: str) -> Array:
    count = count or _BYTES // (2 * letters + 2)
    return ord("a") + _numbers(count * letters, 26, key, "letters").reshape(count, letters)


def _paired(words: Array, answers: Array) -> Array:
    """Return the text of lines `word:answer`."""
    count, letters = words.shape
    text = np.empty((count, 2 * letters + 2), np.uint8)
    text[:, :letters] = words
    text[:, letters] = ord(":")
    text[:, letters + 1 : -1] = answers
    text[:, -1] = ord("\n")
    return text.reshape(-1)


# ---- Repeats: a word is found by looking for where its first letter stood before


_WORDS, _LENGTH = 8, 5
"""Words of a line, and letters of a word."""


def make_repeats(level: int = 3, count: int = 0) -> Array:
    """Return lines of eight words, each one of `level` random words of that line."""
    size = _WORDS * (_LENGTH + 1)
    count = count or _BYTES // size
    letters = _numbers(count * level * _LENGTH, 26, "repeats", "letters")
    known = (ord("a") + letters).reshape(count, level, _LENGTH)
    chosen = _numbers(count * _WORDS, level, "repeats", "words").reshape(count, _WORDS)
    text = np.full((count, _WORDS, _LENGTH + 1), ord(" "), np.uint8)
    text[..., :_LENGTH] = known[np.arange(count)[:, None], chosen]
    text[:, -1, _LENGTH] = ord("\n")
    return text.reshape(-1)


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
