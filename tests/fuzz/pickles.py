"""Hostile and damaged pickles, written opcode by opcode."""

from __future__ import annotations

import pickle
import random
import struct

import numpy as np

NDARRAY, DTYPE = b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
MINUS_ONE = b"J\xff\xff\xff\xff"
PLAIN = b"(K\x03U\x01|NNN" + 2 * MINUS_ONE + b"K\x00t"  # the state of a dtype without fields
EMPTY_ARRAY = RECONSTRUCT + b"(" + NDARRAY + b"(K\x00tU\x01btR"
MANY = 200_000


def text(value: bytes) -> bytes:
    """A Python 2 string."""
    return b"U" + bytes([len(value)]) + value


def number(value: int) -> bytes:
    """An integer of any size."""
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def dtype(code: bytes = b"u1", state: bytes = PLAIN) -> bytes:
    """A numpy type, as numpy pickles it."""
    return DTYPE + b"(" + text(code) + b"K\x00K\x01tR" + state + b"b"


def array(
    shape: tuple[int, ...] = (4,), kind: bytes = dtype(), content: bytes = text(b"\1\2\3\4")
) -> bytes:
    """A numpy array, as numpy pickles it; the parts need not fit each other."""
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    return EMPTY_ARRAY + b"(K\x01" + sizes + kind + b"I00\n" + content + b"tb"


def batch(data: bytes, labels: bytes = b"](K\x00e") -> bytes:
    """The dictionary of a CIFAR file."""
    return b"\x80\x02}(" + text(b"data") + data + text(b"labels") + labels + b"u."


_WILD = text(struct.pack("<4Q", *[0xDEADBEEF] * 4))  # pointers, where numpy believes them
_TUPLE = b"cbuiltins\ntuple\n"

ATTACKS = {
    "object dtype without its flags": batch(array((4,), dtype(b"O8"), _WILD)),
    "object dtype as labels": batch(text(b""), array((4,), dtype(b"O8"), _WILD)),
    "object dtype, then two builds": batch(
        array((4,), dtype(b"O8") + PLAIN.replace(b"K\x00t", b"K\x3ft") + b"b", _WILD)
    ),
    "structured dtype": batch(
        array((1,), dtype(b"V8", b"(K\x03U\x01|N(U\x01ft}U\x01f(" + dtype(b"O8") + b"K\x00tsK\x08"
                          b"K\x01K\x00t"), text(b"\x41" * 8))
    ),
    "string dtype": batch(array((1,), dtype(b"S4"))),
    "float dtype": batch(array((1,), dtype(b"f4"))),
    "big-endian bytes": batch(array((1,), dtype(b"i4", PLAIN.replace(b"|", b">")))),
    "dtype without a state": batch(array(kind=DTYPE + b"(" + text(b"u1") + b"K\x00K\x01tR")),
    "dtype that is a number": batch(array(kind=b"K\x01")),
    "huge shape": batch(array((2**62,))),
    "product of the shape overflows": batch(array((2**32, 2**32))),
    "negative shape": batch(array((-4,))),
    "two negative sizes": batch(array((-2, -2))),
    "a thousand dimensions": batch(array((1,) * 1000)),
    "shape of another size": batch(array((5,))),
    "zero times huge": batch(array((0, 2**60), content=text(b""))),
    "list instead of bytes": batch(array(content=b"](K\x01K\x02e")),
    "text instead of bytes": batch(array(content=b"X\x04\x00\x00\x00abcd")),
    "array as the bytes of an array": batch(array(content=array())),
    "array built twice": batch(array() + b"(K\x01(K\x01t" + dtype() + b"I00\nU\x01xtb"),
    "array never built": batch(EMPTY_ARRAY),
    "array inside itself": batch(EMPTY_ARRAY + b"q\x02(K\x01(K\x04th\x02I00\nh\x02tb"),
    "ndarray called directly": batch(NDARRAY + b"(" + number(2**40) + b"tR"),
    "dtype of an object": batch(DTYPE + b"(" + NDARRAY + b"tR"),
    "reconstruct of a dtype": batch(RECONSTRUCT + b"(" + DTYPE + b"(K\x00tU\x01btR"),
    "function with attributes": batch(b"c_codecs\nencode\n(N}U\x0c__defaults__K\x01stb"),
    "new object of a class": batch(NDARRAY + b"(K\x04t\x81"),
    "instance opcode": batch(b"(K\x04inumpy\nndarray\n"),
    "object opcode": batch(b"(" + NDARRAY + b"K\x04o"),
    "extension registry": batch(b"\x82\x01"),
    "out-of-band buffer": batch(b"\x97"),
    "bytearray": batch(b"\x96" + struct.pack("<Q", 2**60)),
    "bytes of a giant length": batch(b"\x8e" + struct.pack("<Q", 2**62)),
    "bytes of more than there can be": batch(b"\x8e" + b"\xff" * 8),
    "bytes of two gigabytes": batch(b"B" + struct.pack("<I", 2**31)),
    "text of a giant length": batch(b"\x8d" + struct.pack("<Q", 2**62)),
    "string of a negative length": batch(b"T" + struct.pack("<i", -1)),
    "number of two gigabytes": batch(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "number of a negative length": batch(b"\x8b" + struct.pack("<i", -5)),
    "number of a megabyte": batch(b"\x8b" + struct.pack("<i", 2**20) + b"\x7f" * 2**20),
    "decimal of many digits": batch(b"L" + b"9" * 100_000 + b"L\n"),
    "frame of a giant length": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "memo with a giant index": batch(b"Nr\xff\xff\xff\xff"),
    "memo that was never filled": batch(b"h\x07"),
    "memo with a negative index": batch(b"Np-1\n"),
    "deep lists": batch(b"]" * MANY + b"a" * (MANY - 1)),
    "deep tuples": batch(b")" + b"\x85" * MANY),
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * MANY + b"K\x01s.",
    "deep tuple in a set": b"\x80\x04\x8f()" + b"\x85" * MANY + b"\x90.",
    "deep dictionaries": b"\x80\x02" + b"}K\x00" * MANY + b"N" + b"s" * MANY + b".",
    "deep marks": b"\x80\x02" + b"(" * MANY + b"t" * MANY + b".",
    "a list inside itself": batch(b"]q\x01h\x01a"),
    "laughing lists": batch(
        b"](K\x01K\x01eq\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60))
    ),
    "a list of nothing but lists": batch(b"]" * MANY + b"("),
    "millions of instructions": b"\x80\x02" + b"N0" * 2_000_000 + b"}.",
    "the same bytes again and again": b"\x80\x02c_codecs\nencode\nq\x00X"
    + struct.pack("<I", 2**20) + b"a" * 2**20 + b"X\x06\x00\x00\x00latin1\x86q\x01"
    + b"h\x00h\x01R" * 20_000 + b"}.",
    "an encoding that unpacks": batch(
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R"
    ),
    "a module that is a path": batch(b"cnumpy/../os\nsystem\n"),
    "attributes of an allowed class": batch(b"\x8c\x05numpy\x8c\x10ndarray.__init__\x93"),
    "a global that is not text": batch(b"K\x01K\x02\x93"),
    "a call of a number": batch(b"K\x01)R"),
    "a state of a number": batch(b"K\x01K\x02b"),
    "items for a number": batch(b"K\x01K\x02a"),
    "items for a tuple": batch(b")K\x01K\x02s"),
    "a key that cannot be one": b"\x80\x02}]K\x01s.",
    "keys without values": b"\x80\x02}(" + text(b"data") + b"u.",
    "no mark": b"\x80\x02t.",
    "an empty stack": b"\x80\x02.",
    "two values at the end": b"\x80\x02}}.",
    "no stop": b"\x80\x02}",
    "no dictionary": b"\x80\x02]K\x01a.",
    "an unknown protocol": b"\x80\xff}.",
    "not ASCII": b"S'\xff\xfe'\n.",
    "shell": b"cposix\nsystem\n(S'true'\ntR.",
    "eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "tuple class": batch(_TUPLE + b"]R"),
    "persistent id": batch(b"Pkey\n"),
    "persistent id on the stack": batch(b"K\x01Q"),
}  # fmt: skip


def good_pickle(rng: random.Random) -> bytes:
    """A small CIFAR file, as one of the protocols writes it."""
    count = rng.randint(1, 8)
    content = {
        b"data": np.frombuffer(rng.randbytes(3 * count), np.uint8).reshape(count, 3),
        b"labels": [rng.randrange(10) for _ in range(count)],
        b"filenames": [b"%d.png" % i for i in range(count)],
    }
    return pickle.dumps(content, protocol=rng.randint(0, 4))


def bad_pickles(rng: random.Random) -> bytes:
    """One pickle to be refused or to be read as plain data, but never to be run.

    Attacks as they are, attacks with changed bytes, good files with changed bytes, two files cut
    into each other, random opcodes.
    """
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(_SHORT)
    if kind == 1:
        return _changed(rng, rng.choice(_SHORT))
    if kind == 2:
        return _changed(rng, good_pickle(rng))
    if kind == 3:
        first, second = (rng.choice([*_SHORT, good_pickle(rng)]) for _ in range(2))
        return first[: rng.randint(0, len(first))] + second[rng.randint(0, len(second)) :]
    return b"\x80\x02" + b"".join(_piece(rng) for _ in range(rng.randint(1, 60))) + b"."


_SHORT = [content for content in ATTACKS.values() if len(content) < 10_000]
_PIECES = [RECONSTRUCT, NDARRAY, DTYPE, PLAIN, EMPTY_ARRAY, dtype(), array(), number(-1)]
_PIECES += [text(b"data"), b"c_codecs\nencode\n", b"q\x00", b"h\x00", b"X\x01\x00\x00\x00a"]


def _piece(rng: random.Random) -> bytes:
    return rng.choice(_PIECES) if rng.random() < 0.5 else rng.choice(OPCODES)


OPCODES = [bytes([c]) for c in b"(.0123NRQ]a)ltd}us\x85\x86\x87\x88\x89beo\x81\x8f\x90\x91\x93\x94"]


def _changed(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[place : place + 1] = rng.randbytes(1)
            case 1:
                del changed[place : place + rng.randint(1, 8)]
            case 2:
                changed[place:place] = _piece(rng)
            case 3:
                changed[place:place] = rng.randbytes(rng.randint(1, 9))
        changed = changed or bytearray(b".")
    return bytes(changed)
